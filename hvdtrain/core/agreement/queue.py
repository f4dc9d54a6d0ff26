"""The pending operations of one rank, shared by threads that submit, wait and drive."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain.core.agreement.lifecycle import (
    Action,
    ChannelState,
    Closed,
    Event,
    FailAll,
    Failed,
    Phase,
    Refuse,
    Report,
    RoundBegan,
    Submitted,
    transition,
)
from hvdtrain.core.agreement.operation import JOIN, LEAVE, Operation
from hvdtrain.errors import HvdtrainError, PeerFailureError, RanksLostError

# A struct itimerspec: the interval and the first time, each in seconds and nanoseconds.
_Times = ctypes.c_long * 4


def after(seconds: float) -> ctypes.Array[ctypes.c_long]:
    """Return the time for `Alarm.set` at which it goes off, from then on."""
    whole = int(seconds)
    return _Times(0, 0, whole, round((seconds - whole) * 1e9))


NOW = after(1e-9)
NEVER = after(0.0)

# Calls that take less than a microsecond and do not release the GIL.
_libc = ctypes.PyDLL(None)
_SETTIME = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Times), ctypes.c_void_p)
_libc.timerfd_settime.argtypes = _SETTIME


class Alarm:
    """A timer of the system: to set it costs one system call, and wakes no thread before its time.

    A condition variable would wake the waiting thread for each change of its time. If the process
    gets no more files, every time but NEVER is at once.
    """

    def __init__(self) -> None:
        self._descriptor: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        self._event = threading.Event() if self._descriptor < 0 else None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Release the timer, for which no thread waits any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def set(self, times: ctypes.Array[ctypes.c_long]) -> None:
        """Let it go off at `after(seconds)`, NOW or NEVER, instead of the time set before."""
        if self._event is None:
            _libc.timerfd_settime(self._descriptor, 0, times, None)
        elif times is NEVER:
            self._event.clear()
        else:
            self._event.set()

    def wait(self) -> None:
        """Block until it goes off, or return at once if it has since it was set."""
        if self._event is None:
            os.read(self._descriptor, 8)
        else:
            self._event.wait()
            self._event.clear()


# Operations that no thread waits for are collected, to be run as a batch, as long as more are
# submitted within the first of these times, and then within the others. A thread that submits many
# is slower while another one works, and will probably wait for them itself.
_SOON = after(500e-6)
_GATHER_SECONDS = (1.2e-3, 1.5e-3)

# How long to wait after an exchange of reports in which no request was common to all members.
_FIRST_BACK_OFF_SECONDS = 200e-6
_LONGEST_BACK_OFF_SECONDS = 10e-3


# Python 3.11 looks up members of an Enum in Python.
OPEN, _CLOSED = Phase.OPEN, Phase.CLOSED


class Waiting:
    """A context manager that counts a thread among those that wait for an operation."""

    __slots__ = ("_lock", "_operation")

    def __init__(self, operation: Operation, lock: AbstractContextManager[bool]) -> None:
        self._operation, self._lock = operation, lock

    def __enter__(self) -> None:
        with self._lock:
            self._operation.waiters += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._operation.waiters -= 1


class Queue:
    """The pending operations of a channel, the threads that wait for them, and its state."""

    def __init__(self, size: int, title: str) -> None:
        # A Recorder while what happens is recorded, called in the thread in which it happens.
        self.track: Any = None
        self.timed = False  # each part of an operation, which then takes no short cut
        self.listeners: list[Callable[[Sequence[int]], None]] = []
        self.progressed = 0.0
        self._title = title
        self.state = ChannelState(size)
        self.pending: dict[str, Operation] = {}
        # A finalizer, or a signal's handler, may submit an operation in the thread that has it.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._ended = threading.Condition(self.lock)
        self._alarm = Alarm()  # for the channel's thread; not set if another one drives
        # Submissions: all of them, those when the alarm was set, and those before the last round.
        self._count = self._count_when_set = self._seen = 0
        self._backing_off = False
        self._back_off_seconds = _FIRST_BACK_OFF_SECONDS
        self._hurry = False  # a thread waits, or will not submit more

    @property
    def closed(self) -> bool:
        return self.state.phase is _CLOSED

    @property
    def busy(self) -> bool:
        """Whether there is a reason to take part in rounds."""
        return not self.closed and bool(self.pending or self.listeners)

    def add(self, operation: Operation) -> None:
        """Add an operation, which the channel's thread begins soon if no other one does."""
        request = operation.request
        key = request.key
        with self.lock:
            if key in self.pending:
                raise ValueError(
                    f"{self._title} {request.subject}: an operation of this name is still "
                    "pending; wait for it, or use another name"
                )
            state = self.state
            if state.phase is not OPEN or request is JOIN or request is LEAVE or state.deserted:
                self.state, actions = transition(self.state, Submitted(request))
                for action in actions:
                    assert isinstance(action, Refuse)
                    kind: type[HvdtrainError] = HvdtrainError
                    if action.lost or action.deserted:
                        kind = RanksLostError if action.lost else PeerFailureError
                    raise kind(f"{self._title} {request.subject}: {action.reason}")
            operation.submitted = time.perf_counter()
            self._count += 1
            if self._backing_off:
                self._changed.notify_all()
            # Before the operation is added: a signal's handler may raise between any two lines. A
            # thread that waits from the beginning drives itself.
            if not self.pending and not operation.waiters:
                self._expect()
            self.pending[key] = operation
            if (track := self.track) is not None:
                track.submitted(operation)

    def admit(self, operation: Operation) -> bool:
        """Add an operation and begin a round if nothing else is pending or timed (driver)."""
        with self.lock:
            state = self.state
            if self.pending or self.timed or state.phase is not OPEN or state.deserted:
                return False
            self.register(operation)
        return True

    def register(self, operation: Operation) -> None:
        """Make an operation pending that a vote is about (driver, with the lock)."""
        self.pending[operation.request.key] = operation
        self._back_off_seconds = _FIRST_BACK_OFF_SECONDS
        if (track := self.track) is not None:
            track.submitted(operation)

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Apply an event to the state (driver, or close()); return the actions to perform."""
        with self.lock:
            self.state, actions = transition(self.state, event)
            if self.closed:
                self._interrupt()
        return actions

    def operations(self) -> list[Operation]:
        with self.lock:
            return list(self.pending.values())

    def begin_round(self) -> tuple[dict[str, Operation], tuple[Action, ...]]:
        """Begin a round (driver); return the pending operations and the actions to perform."""
        with self.lock:
            self._note_round()
            pending = self.pending.copy()
            requests = tuple([operation.request for operation in pending.values()])
            event = RoundBegan(requests, bool(self.listeners))
            self.state, actions = transition(self.state, event)
        return pending, actions

    def _note_round(self) -> None:
        if not self.closed:  # otherwise the channel's thread must see that
            self._seen, self._hurry = self._count, False
            self._alarm.set(NEVER)

    def report(self) -> tuple[list[Operation], Report]:
        """Return the pending operations, and the report of them for other members (driver)."""
        now = time.perf_counter()
        with self.lock:
            self._note_round()
            operations = list(self.pending.values())
            joined = self.pending.get(JOIN.key)
            # With the lock: a program that waits after it has left must not seem not to have left.
            awaited = frozenset(o.request.key for o in operations if o.is_awaited(now))
        return operations, Report(
            tuple(operation.request for operation in operations),
            awaited,
            0.0 if joined is None else now - joined.submitted,
        )

    def end(
        self, operation: Operation, error: BaseException | None = None, result: object = None
    ) -> None:
        """Set the outcome of an operation, and wake the threads that wait for it."""
        if (track := self.track) is not None:
            track.ended(operation, error)
        with self.lock:
            self._remove(operation)
            operation.end(result, error)
            self.progressed = time.perf_counter()
            if operation.waiters:
                self._ended.notify_all()

    def end_all(self, operations: Sequence[Operation]) -> None:
        """End operations that have succeeded without a result."""
        if (track := self.track) is not None:
            for operation in operations:
                track.ended(operation)
        with self.lock:
            pending = self.pending
            for operation in operations:
                key = operation.request.key
                if pending.get(key) is operation:
                    del pending[key]
                operation.end()
            self.progressed = time.perf_counter()
            self._ended.notify_all()

    def _remove(self, operation: Operation) -> None:
        key = operation.request.key
        # A joined rank's answer has the key of an operation that it may have submitted since.
        if self.pending.get(key) is operation:
            del self.pending[key]

    def give_up(self, error: BaseException) -> None:
        """Close the queue and fail all operations: an engine call failed or was interrupted."""
        lost = isinstance(error, RanksLostError)
        self.apply(Failed(str(error) if lost else f"an earlier operation failed: {error}", lost))
        self.end_pending(error)

    def end_pending(self, error: BaseException) -> None:
        for operation in self.operations():
            self.end(operation, error)

    def abandon(self, error: RanksLostError) -> None:
        """Close the queue because members have ended, and let running operations end."""
        self.apply(Failed(str(error), lost=True))
        for operation in self.operations():
            operation.abandon()

    def close(self) -> tuple[Action, ...]:
        """Close the queue and let running operations complete; return the actions for `fail`."""
        actions = self.apply(Closed())
        for operation in self.operations():
            operation.abandon()
        return actions

    def fail(self, actions: tuple[Action, ...]) -> None:
        """Fail the operations that were pending when the channel was closed."""
        for action in actions:
            if isinstance(action, FailAll):
                for operation in self.operations():
                    subject = operation.request.subject
                    self.end(operation, HvdtrainError(f"{self._title} {subject}: {action.reason}"))

    def wait(self, operation: Operation, may_drive: Callable[[], bool]) -> None:
        """Block until an operation has ended, or until this thread may drive."""
        with self.lock:
            self._ended.wait_for(lambda: operation.done or may_drive())

    def wake_drivers(self) -> None:
        if self.pending or self.listeners:
            with self.lock:
                self._expect()
                self._ended.notify_all()

    def waiting(self, operation: Operation) -> Waiting:
        """Return a context in which this rank counts as blocked in an operation."""
        return Waiting(operation, self.lock)

    def listen(self, listener: Callable[[Sequence[int]], None]) -> None:
        """Take part in rounds even if nothing is pending, until `unlisten`."""
        with self.lock:
            self.listeners.append(listener)
            self._interrupt()

    def unlisten(self, listener: Callable[[Sequence[int]], None]) -> None:
        with self.lock:
            if listener in self.listeners:
                self.listeners.remove(listener)

    def call_listeners(self, ranks: Sequence[int]) -> None:
        """Call the listeners: some of these ranks are blocked, and may need this one."""
        for listener in list(self.listeners):
            listener(ranks)

    def hurry(self) -> None:
        """Let the channel's thread begin a round without waiting for more operations."""
        with self.lock:
            self._hurry = True
            self._interrupt()

    def close_alarm(self) -> None:
        with self.lock:
            self._alarm.close()

    def wait_for_work(self) -> bool:
        """Block until operations are pending; return False if the channel is closed."""
        while not self.closed:
            self._alarm.wait()
            with self.lock:
                if self.busy:
                    self._gather()
                if self.busy:
                    return True
        return False

    def back_off(self) -> None:
        """Wait for a submission on this rank, or on another rank in the meantime (driver)."""
        with self.lock:
            self._backing_off = True
            arrived = self._changed.wait_for(
                lambda: self.closed or self._count > self._seen, self._back_off_seconds
            )
            self._backing_off = False
            longer = min(2 * self._back_off_seconds, _LONGEST_BACK_OFF_SECONDS)
            self._back_off_seconds = _FIRST_BACK_OFF_SECONDS if arrived else longer

    def reset_back_off(self) -> None:
        """Begin with short waits again, because operations could be run."""
        self._back_off_seconds = _FIRST_BACK_OFF_SECONDS

    def _expect(self) -> None:
        """Let the channel's thread begin a round soon, unless another does (with the lock)."""
        self._count_when_set = self._count
        self._alarm.set(NOW if self._hurry else _SOON)

    def _interrupt(self) -> None:
        """Let the channel's thread look at the queue now (with the lock)."""
        self._alarm.set(NOW)
        self._changed.notify_all()

    def _gather(self) -> None:
        """Wait as long as more was submitted since the alarm was set, unless there is a hurry."""
        before = self._count_when_set
        for seconds in _GATHER_SECONDS:
            if self._count == before:
                break
            before = self._count
            if self._changed.wait_for(lambda: self._hurry or self.closed, seconds):
                break
        self._hurry = False
