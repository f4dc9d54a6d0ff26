"""A communicator with a queue: operations are agreed on first, and then run in one order."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.core.agreement import Decision, decide, exchange, unanimous
from hvdtrain.core.operation import Farewell, Operation
from hvdtrain.core.request import JOIN, LEAVE, LISTEN, UNNAMED, Request, unpacked
from hvdtrain.core.timeline.recording import Track
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import HvdtrainError, MismatchError, PeerFailureError

__all__ = ["Channel"]

# Operations that nobody waits for gather as long as more come within so short a time, to be done
# together. A thread that submits many is also slower beside one that is already at work.
_GATHER_SECONDS = 300e-6
_LONGEST_GATHER_SECONDS = 3e-3

# The room for operations that are done together.
_TOGETHER_BYTES = 4 << 20

# How long to wait for news after an exchange in which no request was submitted by all.
_FIRST_PAUSE_SECONDS = 200e-6
_LONGEST_PAUSE_SECONDS = 10e-3


class Channel:
    """A communicator whose members agree on each operation before they enter it.

    Operations may be submitted in different orders by different members. One thread at a time,
    the driver, takes part in rounds and runs operations: the channel's own, or a caller that
    waits anyway.

    Args:
        communicator: nobody else may use it.
        ranks: the members' numbers in the world.
        title: names the rank in messages.
        shadow: makes the operation with which a joined rank answers a request.
        label: names it in a timeline.

    Attributes:
        parent: the channel with the same members that it was made beside, if any.
        unused: whoever it was made for on this rank is gone.
        track: notes what happens while a timeline is recorded; None otherwise.
        number: counts the channels with the same members, in the order of their making.
        progressed: when an operation ended last (time.perf_counter).
    """

    def __init__(
        self,
        communicator: Communicator,
        ranks: Sequence[int],
        title: str,
        shadow: Callable[[Request], Operation],
        label: str,
    ) -> None:
        self.communicator = communicator
        self.ranks = list(ranks)
        self.parent: Channel | None = None
        self.unused = False
        self.label = label
        self.track: Track | None = None
        self.number = 0
        self.progressed = 0.0
        self._unnamed: Counter[str] = Counter()
        self._title = title
        self._shadow = shadow
        self._pending: dict[str, Operation] = {}
        self._unjoined = frozenset(range(communicator.size))
        self._driver = threading.Lock()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._submitted = 0
        self._heard = 0  # how many submissions the driver had seen in its last round
        self._pausing = False
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._closed = False
        self._hurry = False  # somebody waits, or will not submit more
        self._waiting = 0  # how many threads of the program do
        self._listener: Callable[[], None] | None = None
        self._memory: npt.NDArray[np.uint8] | None = None
        self.has_thread = communicator.capabilities.concurrent
        if self.has_thread:
            threading.Thread(target=self._serve, name="hvdtrain-channel", daemon=True).start()

    def submit(self, operation: Operation, at_once: bool = False) -> None:
        """Queue an operation and return at once (collective, in any order).

        Args:
            operation: what to do.
            at_once: start it now, instead of gathering operations for a moment.

        Raises:
            ValueError: an operation of that name is under way.
        """
        alone = self._add(operation)
        if self.has_thread:
            if at_once or alone:
                self._wake(at_once)
        elif self.communicator.size == 1:
            self.wait(operation)

    def _wake(self, hurry: bool) -> None:
        with self._lock:
            self._hurry |= hurry
            self._news.notify_all()

    def run(self, operation: Operation) -> Any:
        """Queue an operation and return its result (collective)."""
        self._add(operation)
        return self.wait(operation)

    def wait(self, operation: Operation) -> Any:
        """Block until a submitted operation is done; return its result or raise its error."""
        self._count_waiting(1)
        try:
            self._drive_or_wait(operation)
        finally:
            self._count_waiting(-1)
        return operation.outcome()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let members know that this one's program is blocked in an operation (local)."""
        self._count_waiting(1)
        try:
            yield
        finally:
            self._count_waiting(-1)

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self._waiting += change

    def _drive_or_wait(self, operation: Operation) -> None:
        if self._driver.acquire(blocking=not self.has_thread):
            try:
                while not operation.done:
                    self._step()
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self._driver.release()
                if self._pending:
                    with self._lock:
                        self._news.notify_all()
        else:
            with self._lock:
                operation.awaited = True
                self._ended.wait_for(lambda: operation.done)

    def _give_up(self, error: BaseException) -> None:
        """End the use of this channel: a rank cannot take back that it has entered a round."""
        with self._lock:
            self._closed = True
        reason = f"{type(error).__name__} in the middle of an operation"
        self._fail_all(HvdtrainError(f"{self._title}: {reason}; end this rank"))

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Take part in rounds although nothing is submitted, until called with None (local).

        Args:
            listener: called, now and then, while another member is blocked in an operation that
                this one has not submitted.
        """
        with self._lock:
            self._listener = listener
            self._news.notify_all()

    def poll(self, operation: Operation) -> bool:
        """Tell whether an operation is done; without a thread of the channel's this waits."""
        if not self.has_thread:
            self.wait(operation)
        elif not operation.done:
            self._wake(hurry=True)
        return operation.done

    def name(self, operation: str, name: str | None) -> str:
        """Return the name of an operation; one without a name is numbered (local)."""
        if name:
            return str(name)
        with self._lock:
            self._unnamed[operation] += 1
            return f"{UNNAMED}{self._unnamed[operation]}"

    def pending(self) -> list[tuple[Request, float | None]]:
        """Return the operations under way, each with `awaited_since` (local)."""
        with self._lock:
            operations = list(self._pending.values())
        return [(operation.request, operation.awaited_since()) for operation in operations]

    def leave(self) -> Operation:
        """Submit the wish to leave, which other members take for an answer (collective)."""
        return self._bid_farewell(LEAVE)

    def join(self) -> Operation:
        """Submit the wish to take part with zeros until all members have joined (collective)."""
        return self._bid_farewell(JOIN)

    def _bid_farewell(self, request: Request) -> Operation:
        with self._lock:
            pending = list(self._pending.values())
        for operation in pending:
            operation.abandon()
        farewell = Farewell(request)
        self.submit(farewell)
        return farewell

    def close(self) -> None:
        """Stop the thread and give the communicator back (collective)."""
        with self._lock:
            self._closed = True
            self._news.notify_all()
        self.communicator.close()

    def _add(self, operation: Operation) -> bool:
        """Queue an operation; tell whether nothing else is queued."""
        key = operation.request.key
        with self._lock:
            if self._closed:
                raise HvdtrainError(f"{self._title} {operation.request.subject}: shut down")
            if key in self._pending:
                raise ValueError(
                    f"{self._title} {operation.request.subject}: an operation of this name is "
                    "under way; wait for it, or use another name"
                )
            operation.submitted = time.perf_counter()
            self._pending[key] = operation
            if (track := self.track) is not None:
                track.submitted(operation)
            self._submitted += 1
            if self._pausing:
                self._news.notify_all()
            return len(self._pending) == 1

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._news.wait_for(lambda: self._closed or self._busy())
                if self._closed:
                    return
                self._gather()
            with self._driver:
                try:
                    while self._busy() and not self._closed:
                        self._step()
                except Exception as error:
                    self._listener = None
                    self._fail_all(error)

    def _busy(self) -> bool:
        return bool(self._pending or self._listener)

    def _gather(self) -> None:
        """Wait for more to be submitted, while the lock is held."""
        seen, until = 0, time.perf_counter() + _LONGEST_GATHER_SECONDS
        while self._submitted != seen and time.perf_counter() < until:
            seen = self._submitted
            if self._news.wait_for(lambda: self._hurry or self._closed, _GATHER_SECONDS):
                break
        self._hurry = False

    def _step(self) -> None:
        """Take part in one round and do what comes out of it (driver only)."""
        with self._lock:
            self._heard = self._submitted
            pending = list(self._pending.values())
        if not pending:
            if self._listener is not None:
                self._listen()
            return
        if (track := self.track) is not None:
            track.proposed(pending[0])
        positions = unanimous(self.communicator, [operation.request for operation in pending])
        agreed = [pending[position] for position in positions]
        if agreed and all(operation.request is not JOIN for operation in agreed):
            self._run_all(agreed)
        else:
            self._settle()

    def _listen(self) -> None:
        if unanimous(self.communicator, [LISTEN]):
            self._pause()
        else:
            self._settle()

    def _settle(self) -> None:
        with self._lock:
            self._heard = self._submitted
            own = [operation.request for operation in self._pending.values()]
            # Nobody keeps a member waiting that has joined.
            blocked, listener = self._waiting > 0 and JOIN not in own, self._listener
        told = exchange(self.communicator, [blocked, *(request.packed for request in own)])
        decision = decide([[unpacked(text) for text in theirs[1:]] for theirs in told], self.ranks)
        # What all have submitted runs now, and the next round tells who is blocked still.
        if listener is not None and not decision.run and any(theirs[0] for theirs in told):
            listener()
        if (track := self.track) is not None:
            track.agreed()
        if decision.deserted:
            self._fail_all(PeerFailureError(f"{self._title} {own[0].subject}: {decision.deserted}"))
        elif decision.all_joined:
            self._finish_join()
        else:
            self._unjoined -= decision.joined
            self._follow(decision)

    def _follow(self, decision: Decision) -> None:
        for key, reason in decision.failed.items():
            operation = self._pending.get(key)
            if operation is not None:
                message = f"{self._title} {operation.request.subject}: {reason}"
                self._end(operation, MismatchError(message))
        self._run_all(
            [self._pending.get(request.key) or self._shadow(request) for request in decision.run]
        )
        if decision.run or decision.failed:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        else:
            self._pause()

    def _pause(self) -> None:
        """Wait for a submission of our own, or long enough for others to have had news."""
        with self._lock:
            self._pausing = True
            fresh = self._news.wait_for(lambda: self._submitted > self._heard, self._pause_seconds)
            self._pausing = False
        longer = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        self._pause_seconds = _FIRST_PAUSE_SECONDS if fresh else longer

    def _finish_join(self) -> None:
        own = time.perf_counter() - self._pending[JOIN.key].submitted
        waited = exchange(self.communicator, [own])
        last = self.ranks[min(self._unjoined, key=waited.__getitem__)]
        self._unjoined = frozenset(range(self.communicator.size))
        self._unnamed.clear()  # ranks that joined early have numbered fewer operations
        self._end(self._pending[JOIN.key], result=last)

    def _run_all(self, operations: Sequence[Operation]) -> None:
        """Run operations that all members have, in this order; kin that follow it, together."""
        for kin, following in groupby(operations, key=lambda operation: operation.kin()):
            together = list(following)
            if kin is not None and len(together) > 1:
                self._run_together(together)
            else:
                for operation in together:
                    self._run(operation)

    def _run_together(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if (track := self.track) is not None:
                track.began(operation)
        try:
            if self._memory is None:
                self._memory = self.communicator.empty(_TOGETHER_BYTES)
            first, *others = operations
            first.execute_with(others, self.communicator, self._memory)
        except Exception as error:
            for operation in operations:
                self._end(operation, error)
        else:
            for operation in operations:
                self._end(operation)

    def _run(self, operation: Operation) -> None:
        if (track := self.track) is not None:
            track.began(operation)
        try:
            result = operation.execute(self.communicator)
        except Exception as error:
            self._end(operation, error)
        else:
            self._end(operation, result=result)

    def _end(
        self, operation: Operation, error: BaseException | None = None, result: Any = None
    ) -> None:
        if (track := self.track) is not None:
            track.ended(operation, error)
        with self._lock:
            self._pending.pop(operation.request.key, None)
            operation.end(result, error)
            self.progressed = time.perf_counter()
            if operation.awaited:
                self._ended.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        for operation in list(self._pending.values()):
            self._end(operation, error)
