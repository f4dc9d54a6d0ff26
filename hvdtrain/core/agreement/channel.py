"""A communicator with a queue: operations are agreed on first, and then run in one order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.arithmetic import in_default_arithmetic
from hvdtrain.core.agreement.driver import Driver
from hvdtrain.core.agreement.observer import ChannelObserver
from hvdtrain.core.agreement.operation import Marker, Operation
from hvdtrain.core.agreement.queue import Queue, Waiting
from hvdtrain.core.agreement.request import JOIN, LEAVE, UNNAMED, Request
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import HvdtrainError

__all__ = ["Channel"]


class Channel:
    """A communicator whose members agree on each operation before they enter it.

    Operations may be submitted in different orders by different members. One thread at a time
    drives: takes part in rounds and runs operations. It is the channel's own, or a caller that
    waits anyway. No operation outlives the channel: each is done, or fails, before it is closed.

    Args:
        communicator: nobody else may use it.
        ranks: the members' numbers in the world.
        title: names the rank in messages.
        answer: makes the operation with which a joined rank answers a request.
        label: names it in a timeline.
        failed: called once, with what happened, when an engine call failed: other members may
            be inside it for ever, and this rank has to end.

    Attributes:
        parent: the channel with the same members that it was made beside, if any.
        unused: whoever it was made for on this rank is gone.
        number: counts the channels with the same members, in the order of their making.
        has_thread: whether operations go on while the program does something else.
    """

    def __init__(
        self,
        communicator: Communicator,
        ranks: Sequence[int],
        title: str,
        answer: Callable[[Request], Operation],
        label: str,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        self.communicator = communicator
        self.ranks = list(ranks)
        self.parent: Channel | None = None
        self.unused = False
        self.label = label
        self.number = 0
        self.has_thread = communicator.capabilities.concurrent
        self._title, self._failed = title, failed
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._left: Operation | None = None
        self._closers: list[Callable[[], None]] = []
        self._queue = Queue(communicator.size, title)
        self._driver = Driver(communicator, self._queue, ranks, title, answer, self._counts.clear)
        self._driving = threading.Lock()
        self._thread: threading.Thread | None = None
        if self.has_thread:
            self._thread = threading.Thread(
                target=self._serve, name="hvdtrain-channel", daemon=True
            )
            self._thread.start()

    @property
    def track(self) -> ChannelObserver | None:
        """What notes what happens while a timeline is recorded."""
        return self._queue.track

    @track.setter
    def track(self, track: ChannelObserver | None) -> None:
        self._queue.track = track

    @property
    def progressed(self) -> float:
        """When an operation ended last (time.perf_counter)."""
        return self._queue.progressed

    def submit(self, operation: Operation, at_once: bool = False) -> None:
        """Queue an operation and return at once (collective, in any order).

        Args:
            operation: what to do.
            at_once: start it now, instead of gathering operations for a moment.

        Raises:
            ValueError: an operation of that name is under way.
            HvdtrainError: the channel is closed, or about to be.
        """
        alone = self._queue.add(operation)
        if self.has_thread:
            if at_once or alone:
                self._queue.wake(at_once)
        elif self.communicator.size == 1:
            self.wait(operation)

    def run(self, operation: Operation) -> Any:
        """Queue an operation and return its result (collective)."""
        operation.waiters = 1
        self._queue.add(operation)
        self._drive_or_wait(operation)
        return operation.outcome()

    def wait(self, operation: Operation) -> Any:
        """Block until a submitted operation is done; return its result or raise its error."""
        with self._queue.waiting(operation):
            self._drive_or_wait(operation)
        return operation.outcome()

    def waiting(self, operation: Operation) -> Waiting:
        """Let members know that this one's program is blocked in an operation (local)."""
        return self._queue.waiting(operation)

    def poll(self, operation: Operation) -> bool:
        """Return whether an operation is done; without a thread of the channel's this waits."""
        if not self.has_thread:
            self.wait(operation)
        elif not operation.done:
            operation.note_poll()
            self._queue.wake(hurry=True)
        return operation.done

    def listen(self, listener: Callable[[], None]) -> None:
        """Take part in rounds although nothing is submitted, until `unlisten` (local).

        Args:
            listener: called, now and then, while another member is blocked in an operation that
                this one has not submitted.
        """
        self._queue.listen(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Take back what `listen` was called for (local)."""
        self._queue.unlisten(listener)

    def count(self, what: str) -> int:
        """Return how often this was called for `what`, since all members joined last (local)."""
        with self._counting:
            self._counts[what] += 1
            return self._counts[what]

    def counted(self, what: str) -> int:
        """Return how often `count` was called for it (local)."""
        return self._counts[what]

    def name(self, operation: str, name: str | None) -> str:
        """Return the name of an operation; one without a name is numbered (local)."""
        return str(name) if name else f"{UNNAMED}{self.count(operation)}"

    def pending(self) -> list[tuple[Request, float | None]]:
        """Return the operations under way, each with `awaited_since` (local)."""
        return [(o.request, o.awaited_since()) for o in self._queue.operations()]

    def leave(self) -> Operation:
        """Submit the wish to leave, unless that is pending or fulfilled (collective).

        What is pending on all members runs first; what is not fails when all have left.
        """
        if self._left is None or self._left.failed:
            self._left = self._mark(LEAVE)
        return self._left

    def join(self) -> Operation:
        """Submit the wish to take part with zeros until all members have joined (collective).

        What this rank has submitted before still runs. The result is the rank that joined last.
        """
        self.communicator.take_device()
        return self._mark(JOIN)

    def _mark(self, request: Request) -> Operation:
        marker = Marker(request)
        self.submit(marker)
        for operation in self._queue.operations():
            operation.abandon()
        return marker

    def before_closing(self, give_back: Callable[[], None]) -> None:
        """Have close() call this before it gives the communicator back (local).

        Args:
            give_back: collective over the members, or over some, in one order on all of them.
        """
        self._closers.append(give_back)

    def close(self) -> None:
        """End the thread, fail what is pending, and give the communicator back (collective).

        What runs now is run to its end before.
        """
        actions = self._queue.close()
        if self._thread is not None:
            self._thread.join()
        with self._driving:
            self._queue.fail(actions)
            for give_back in self._closers:
                give_back()
            self.communicator.close()

    @in_default_arithmetic
    def _drive_or_wait(self, operation: Operation) -> None:
        while not self._is_over(operation):
            if self._driving.acquire(blocking=False):
                try:
                    while not self._is_over(operation):
                        self._driver.round()
                except BaseException as error:
                    self._give_up(error)
                    raise
                finally:
                    self._driving.release()
                    self._queue.pass_on()
            else:
                self._queue.wait(operation, lambda: not self._driving.locked())
        if not operation.done:
            self._queue.wait(operation, lambda: False)  # close() ends it

    def _is_over(self, operation: Operation) -> bool:
        return operation.done or self._queue.closed

    @in_default_arithmetic
    def _serve(self) -> None:
        while self._queue.wait_for_work():
            with self._driving:
                try:
                    while self._queue.busy:
                        self._driver.round()
                except Exception as error:
                    self._give_up(error)
            self._queue.pass_on()

    def _give_up(self, error: BaseException) -> None:
        """Close for good: a rank cannot take back that it has entered a round."""
        subject = self._driver.subject
        if isinstance(error, Exception):
            error.add_note(f"This happened in {subject}.")
            self._queue.give_up(error)
            if self._failed is not None:
                self._failed(f"{subject}: {type(error).__name__}: {error}")
            return
        # A signal's handler raised, in the thread that waits.
        reason = f"{self._title}: {type(error).__name__} in the middle of an operation"
        self._queue.give_up(HvdtrainError(f"{reason}; end this rank"))
