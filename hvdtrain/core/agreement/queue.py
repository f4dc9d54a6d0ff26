"""The operations that are under way on one rank, for the threads that submit, wait and drive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.core.agreement.decision import Report
from hvdtrain.core.agreement.events import (
    Action,
    ChannelState,
    Closed,
    Event,
    FailAll,
    Failed,
    Phase,
    Refuse,
    RoundBegan,
    Submitted,
)
from hvdtrain.core.agreement.lifecycle import transition
from hvdtrain.core.agreement.observer import ChannelObserver
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import JOIN
from hvdtrain.errors import HvdtrainError

__all__ = ["Queue", "Waiting"]

# Operations that nobody waits for gather as long as more come within so short a time, to be done
# together. A thread that submits many is also slower beside one that is already at work.
_GATHER_SECONDS = 300e-6
_LONGEST_GATHER_SECONDS = 3e-3

# How long to wait for news after an exchange in which no request was submitted by all.
_FIRST_PAUSE_SECONDS = 200e-6
_LONGEST_PAUSE_SECONDS = 10e-3


class Waiting:
    """Counts a thread among those that wait for an operation, for a `with` block."""

    __slots__ = ("_lock", "_operation")

    def __init__(self, operation: Operation, lock: threading.Lock) -> None:
        self._operation, self._lock = operation, lock

    def __enter__(self) -> None:
        with self._lock:
            self._operation.waiters += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._operation.waiters -= 1


class Queue:
    """What is pending, who waits for it, and the state of the channel's life.

    Args:
        size: how many members the channel has.
        title: names the rank in messages.

    Attributes:
        track: notes what happens while a timeline is recorded; None otherwise.
        listeners: called while another member is blocked.
        progressed: when an operation ended last (time.perf_counter).
    """

    def __init__(self, size: int, title: str) -> None:
        self.track: ChannelObserver | None = None
        self.listeners: list[Callable[[], None]] = []
        self.progressed = 0.0
        self._title = title
        self._state = ChannelState(size)
        self._operations: dict[str, Operation] = {}
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._submitted = 0
        self._seen = 0  # how many submissions the driver had seen in its last round
        self._resting = False
        self._rest_seconds = _FIRST_PAUSE_SECONDS
        self._hurry = False  # somebody waits, or will not submit more

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._state.phase is Phase.CLOSED

    @property
    def busy(self) -> bool:
        """Whether there is a reason to take part in rounds."""
        return not self.closed and bool(self._operations or self.listeners)

    def add(self, operation: Operation) -> bool:
        """Take an operation; return whether nothing else is pending.

        Raises:
            HvdtrainError: the channel takes nothing any more.
            ValueError: an operation of that name is under way.
        """
        request = operation.request
        with self._lock:
            if request.key in self._operations:
                raise ValueError(
                    f"{self._title} {request.subject}: an operation of this name is under way; "
                    "wait for it, or use another name"
                )
            self._state, actions = transition(self._state, Submitted(request))
            for action in actions:
                assert isinstance(action, Refuse)
                raise HvdtrainError(f"{self._title} {request.subject}: {action.reason}")
            operation.submitted = time.perf_counter()
            self._operations[request.key] = operation
            if (track := self.track) is not None:
                track.submitted(operation)
            self._submitted += 1
            if self._resting:
                self._news.notify_all()
            return len(self._operations) == 1

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Bring the state further (driver, or close()); return what is to be done."""
        with self._lock:
            self._state, actions = transition(self._state, event)
            if self.closed:
                self._news.notify_all()
        return actions

    def operations(self) -> list[Operation]:
        """Return what is pending, in the order of submission."""
        with self._lock:
            return list(self._operations.values())

    def begin_round(self) -> tuple[list[Operation], tuple[Action, ...]]:
        """Return what is pending, and what is to be done; later submissions are news (driver)."""
        with self._lock:
            self._seen = self._submitted
            pending = list(self._operations.values())
            requests = tuple([operation.request for operation in pending])
            event = RoundBegan(requests, bool(self.listeners))
            self._state, actions = transition(self._state, event)
        return pending, actions

    def report(self) -> tuple[list[Operation], Report]:
        """Return what is pending, and what other members are to know of it (driver)."""
        now = time.perf_counter()
        with self._lock:
            self._seen = self._submitted
            operations = list(self._operations.values())
            joined = self._operations.get(JOIN.key)
        return operations, Report(
            tuple(operation.request for operation in operations),
            frozenset(o.request.key for o in operations if o.is_awaited(now)),
            0.0 if joined is None else now - joined.submitted,
        )

    def end(
        self, operation: Operation, error: BaseException | None = None, result: Any = None
    ) -> None:
        """Note how an operation ended, and wake who waits for it."""
        if (track := self.track) is not None:
            track.ended(operation, error)
        with self._lock:
            key = operation.request.key
            # What answers for this rank has the key of what it may have submitted meanwhile.
            if self._operations.get(key) is operation:
                del self._operations[key]
            operation.end(result, error)
            self.progressed = time.perf_counter()
            if operation.waiters:
                self._ended.notify_all()

    def give_up(self, error: BaseException) -> None:
        """Take nothing any more, and fail what is pending: an engine call failed or was cut off."""
        self.apply(Failed(f"an earlier operation failed: {error}"))
        for operation in self.operations():
            self.end(operation, error)

    def close(self) -> tuple[Action, ...]:
        """Take nothing more, and miss no bucket in what runs; return what `fail` does after it."""
        actions = self.apply(Closed())
        for operation in self.operations():
            operation.abandon()
        return actions

    def fail(self, actions: tuple[Action, ...]) -> None:
        """Fail what is pending, if the channel was closed before it could run."""
        for action in actions:
            if isinstance(action, FailAll):
                for operation in self.operations():
                    subject = operation.request.subject
                    self.end(operation, HvdtrainError(f"{self._title} {subject}: {action.reason}"))

    def wait(self, operation: Operation, may_drive: Callable[[], bool]) -> None:
        """Block until another thread has ended an operation, or none drives any more."""
        with self._lock:
            self._ended.wait_for(lambda: operation.done or may_drive())

    def pass_on(self) -> None:
        """Wake those who may drive now (local)."""
        if self._operations:
            with self._lock:
                self._news.notify_all()
                self._ended.notify_all()

    def waiting(self, operation: Operation) -> Waiting:
        """Let members know that a thread of this one's program waits for an operation."""
        return Waiting(operation, self._lock)

    def listen(self, listener: Callable[[], None]) -> None:
        """Add one who is called while another member is blocked."""
        with self._lock:
            self.listeners.append(listener)
            self._news.notify_all()

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Take it away again."""
        with self._lock:
            if listener in self.listeners:
                self.listeners.remove(listener)

    def wake(self, hurry: bool = False) -> None:
        """Have the thread look for something to do; in a hurry it gathers no more."""
        with self._lock:
            self._hurry |= hurry
            self._news.notify_all()

    def wait_for_work(self) -> bool:
        """Block until there is something to do, and more has gathered; return False when closed."""
        with self._lock:
            self._news.wait_for(lambda: self.closed or self.busy)
            seen, until = 0, time.perf_counter() + _LONGEST_GATHER_SECONDS
            while self._submitted != seen and time.perf_counter() < until:
                seen = self._submitted
                if self._news.wait_for(lambda: self._hurry or self.closed, _GATHER_SECONDS):
                    break
            self._hurry = False
            return not self.closed

    def rest(self) -> None:
        """Wait for a submission of our own, or long enough for others to have had news (driver)."""
        with self._lock:
            self._resting = True
            fresh = self._news.wait_for(
                lambda: self.closed or self._submitted > self._seen, self._rest_seconds
            )
            self._resting = False
        longer = min(2 * self._rest_seconds, _LONGEST_PAUSE_SECONDS)
        self._rest_seconds = _FIRST_PAUSE_SECONDS if fresh else longer

    def rested(self) -> None:
        """Begin with short rests again: something could be done (driver)."""
        self._rest_seconds = _FIRST_PAUSE_SECONDS
