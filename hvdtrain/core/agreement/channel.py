"""A communicator with a queue: operations are agreed on, and then run in the same order."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NoReturn, Self, TypeVar
from weakref import WeakKeyDictionary

from hvdtrain.collective import collective
from hvdtrain.core.agreement.driver import HASHES, Driver
from hvdtrain.core.agreement.operation import (
    JOIN,
    LEAVE,
    UNNAMED,
    Operation,
    Repeatable,
    Request,
    Work,
)
from hvdtrain.core.agreement.queue import OPEN, Queue
from hvdtrain.core.tuning import in_default_arithmetic
from hvdtrain.engines.communicator import VOTE_DONE, Communicator
from hvdtrain.errors import HvdtrainError, RanksLostError
from hvdtrain.streams import HOST, Streams


class Stopwatch:
    """The sum of the time that a rank's program waits for others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.since: float | None = None
        self.note: Callable[[tuple[float, float]], None] | None = None  # each interval

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context manager that adds the time of a `with` block."""
        start = self.since = time.perf_counter()
        try:
            yield
        finally:
            end, self.since = time.perf_counter(), None
            self.seconds += end - start
            if self.note is not None:
                self.note((start, end))


class Channel:
    """A communicator whose members agree on each operation before they run it.

    Members may submit operations in different orders. One thread at a time drives the channel:
    it takes part in rounds and runs operations. This is either the channel's own thread or a
    caller that waits anyway. No operation outlives the channel: each completes or fails before
    the channel is closed.
    """

    def __init__(
        self,
        communicator: Communicator,
        ranks: Sequence[int],
        title: str,
        answer: Callable[[Request], Operation],
        label: str,
        failed: Callable[[str], None] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> None:
        self.communicator = communicator
        self.ranks = list(ranks)
        self.parent: Channel | None = None
        self.unused = False
        self.label = label
        self.number = 0
        self.blocked = Stopwatch()
        self.has_thread = communicator.capabilities.concurrent
        self._counts: Counter[str] = Counter()
        self._left: Operation | None = None
        self._closers: list[Callable[[], None]] = []
        self.queue = queue = Queue(communicator.size, title)
        self._counting = queue.lock
        self.waiting, self.call_listeners = queue.waiting, queue.call_listeners
        self.listen, self.unlisten = queue.listen, queue.unlisten
        self._driver = Driver(communicator, queue, ranks, title, answer, self._counts.clear)
        self._title, self._failed, self._lost = title, failed, lost
        self.turn = threading.Lock()  # of the thread that drives
        self._caller = 0  # which that is
        self._thread: threading.Thread | None = None
        if self.has_thread:
            self._thread = threading.Thread(
                target=self._drive_in_thread, name="hvdtrain-channel", daemon=True
            )
            self._thread.start()

    @collective
    def submit(self, operation: Operation, hurry: bool = False) -> None:
        """Submit an operation without waiting for it (in any order)."""
        self.queue.add(operation)
        if self.has_thread:
            if hurry:
                self.queue.hurry()
        elif self.communicator.size == 1 and not self._is_driving():
            self.wait(operation)

    @collective
    def run(self, operation: Operation) -> Any:
        queue, watch, admitted = self.queue, self.blocked, False
        operation.waiters = 1
        operation.submitted = start = watch.since = time.perf_counter()
        try:
            if self.turn.acquire(False):
                try:
                    self._caller = get_ident()
                    if admitted := queue.admit(operation):
                        # The usual case: it is all that a round is about, and done by the vote.
                        self._driver.doing, ballot = (operation,), operation.request.ballot
                        highest = operation.vote((), self.communicator, ballot * HASHES)
                        self._conclude(operation, highest)
                except BaseException as error:
                    self._fail(error)
                finally:
                    self._end_turn()
            if not operation.done:
                self._complete(operation, admitted)
            return operation.outcome()
        finally:  # as in `Stopwatch.running`, which takes longer
            queue.progressed = end = time.perf_counter()
            watch.since = None
            watch.seconds += end - start
            if watch.note is not None:
                watch.note((start, end))

    @collective
    def repeat(
        self,
        like: Repeatable,
        name: str | None,
        source: Any,
        address_of: Callable[[Any], int],
        allocate: Callable[[Any], Any] | None,
    ) -> Any:
        """Run an operation in place or in new memory, unless it must be queued.

        It becomes pending only if members are late or differ. Return the result, or None.
        """
        queue, calls = self.queue, like.vote_calls
        if calls is None or not self.turn.acquire(False):
            return None
        try:
            self._caller = get_ident()
            with queue.lock:
                state = queue.state
                others = queue.pending or state.phase is not OPEN or state.deserted
                if others or queue.track is not None:
                    return None
                number = 0
                if not name:  # as `count` does it
                    self._counts[like.request.operation] += 1
                    number = self._counts[like.request.operation]
                self._driver.doing = ()
                cast, look = calls
                cast(like.request.ballot, number, read := address_of(source))
                if allocate is None:
                    target, written = source, read
                else:  # meanwhile members arrive
                    target = allocate(source)
                    written = address_of(target)
                verdict = look(written)
                if verdict == VOTE_DONE:
                    queue.progressed = time.perf_counter()
                    return target
                name = name or f"{UNNAMED}{number}"
                operation = like.operation(name, source, target, read, written)
                operation.waiters, operation.submitted = 1, time.perf_counter()
                queue.register(operation)
            self._driver.doing = (operation,)
            with self.blocked.running():
                self._conclude(operation, like.finish(verdict))
        except BaseException as error:
            self._fail(error)
        finally:
            self._end_turn()
        if not operation.done:
            with self.blocked.running():
                self._complete(operation, True)
        operation.outcome()
        return target

    def _end_turn(self) -> None:
        self._caller = 0
        self.turn.release()
        if self.queue.pending or self.queue.listeners:
            self.queue.wake_drivers()

    @collective
    def _conclude(self, operation: Operation, highest: bytes) -> None:
        """End an operation that its vote has run, or perform what follows from the maxima."""
        queue = self.queue
        if highest:
            self._driver.follow(operation, highest)
            return
        with queue.lock:
            del queue.pending[operation.request.key]
        operation.done = True
        if queue.track is not None:
            queue.track.ended(operation)

    @collective
    def _complete(self, operation: Operation, admitted: bool) -> None:
        """Take part in rounds until an operation has ended, which may have to be added first."""
        self._refuse_nested(operation)
        try:
            if not admitted:
                self.queue.add(operation)
            self._drive_until_done(operation)
        except BaseException:
            # A signal's handler may raise before this thread drives.
            self.queue.wake_drivers()
            raise

    @collective
    def wait(self, operation: Operation) -> Any:
        with self.queue.waiting(operation):
            self._drive_until_done(operation)
        return operation.outcome()

    @in_default_arithmetic
    @collective
    def _drive_until_done(self, operation: Operation) -> None:
        """Take part in rounds until an operation has ended, or wait while another thread does."""
        while not self._is_over(operation):
            if self.turn.acquire(blocking=False):
                try:
                    self._caller = get_ident()
                    while not self._is_over(operation):
                        self._driver.round()
                except BaseException as error:
                    self._fail(error)
                finally:
                    self._end_turn()
            else:
                self._refuse_nested(operation)
                self.queue.wait(operation, lambda: not self.turn.locked())
        if not operation.done:
            self.queue.wait(operation, lambda: False)  # close() ends it

    def _is_driving(self) -> bool:
        return self._caller == get_ident()

    def _refuse_nested(self, operation: Operation) -> None:
        if self._is_driving() and not operation.done:
            raise HvdtrainError(
                f"{self._title} {operation.request.subject} was called by a finalizer or a "
                "signal's handler within another operation of the same thread, which cannot wait "
                "for both: call its asynchronous form there, and wait for that later"
            )

    def _is_over(self, operation: Operation) -> bool:
        return operation.done or self.queue.closed

    @in_default_arithmetic
    def _drive_in_thread(self) -> None:
        """Take part in rounds whenever operations are pending: the channel's own thread."""
        while self.queue.wait_for_work():
            with self.turn:
                self._caller = get_ident()
                try:
                    while self.queue.busy:
                        self._driver.round()
                except Exception as error:
                    self._give_up(error)
                self._caller = 0
            self.queue.wake_drivers()

    def _fail(self, error: BaseException) -> NoReturn:
        """Close the channel after an error, and raise what it means."""
        explained = self._give_up(error)
        if explained is error:
            raise error
        raise explained from error

    def _give_up(self, error: BaseException) -> BaseException:
        """Close the channel after an error: a rank cannot withdraw from a round."""
        subject = self._driver.subject
        error = self.communicator.explained(error)
        if isinstance(error, RanksLostError):
            if self._lost is not None:
                self._lost()
            self.queue.give_up(error)
        elif isinstance(error, Exception):
            error.add_note(f"This happened in {subject}.")
            self.queue.give_up(error)
            if self._failed is not None:
                self._failed(f"{subject}: {type(error).__name__}: {error}")
        else:  # a signal's handler raised, in the thread that waits
            reason = f"{self._title}: {type(error).__name__} in the middle of an operation"
            self.queue.give_up(HvdtrainError(f"{reason}; end this rank"))
        return error

    def poll(self, operation: Operation) -> bool:
        """Return whether an operation is done; wait for it if the channel has no thread."""
        if not self.has_thread:
            self.wait(operation)
        elif not operation.done:
            operation.note_poll()
            self.queue.hurry()
        return operation.done

    def end_pass(self) -> None:
        """Tell all pending operations that a backward pass has ended."""
        for operation in self.queue.operations():
            operation.end_pass()

    def count(self, what: str) -> int:
        """Increment and return a counter, which restarts when all members have joined."""
        with self._counting:
            self._counts[what] += 1
            return self._counts[what]

    def counted(self, what: str) -> int:
        """Return a counter without incrementing it."""
        return self._counts[what]

    def name(self, operation: str, name: str | None) -> str:
        """Return the name of an operation, numbered if it has none."""
        if name:
            return str(name)
        with self._counting:
            self._counts[operation] += 1
            return f"{UNNAMED}{self._counts[operation]}"

    def pending(self) -> list[tuple[Request, float | None]]:
        """Return the pending requests, each with its operation's `awaited_since`."""
        return [(o.request, o.awaited_since()) for o in self.queue.operations()]

    @collective
    def leave(self) -> Operation:
        """Submit a request to leave unless one is there; what is pending on all runs first."""
        if self._left is None or self._left.failed:
            self._left = self._mark(LEAVE)
        return self._left

    @collective
    def join(self) -> Operation:
        """Submit a request to contribute zeros until all members have joined, for a JoinOrder."""
        self.communicator.take_device()
        return self._mark(JOIN)

    def _mark(self, request: Request) -> Operation:
        marker = Work(request)
        self.submit(marker)
        for operation in self.queue.operations():
            operation.abandon()
        return marker

    def before_closing(self, closer: Callable[[], None]) -> None:
        """Register a function for close() to call before it closes the communicator."""
        self._closers.append(closer)

    @collective
    def close(self) -> None:
        """End the thread after what runs, fail what is pending, and close the communicator."""
        actions = self.queue.close()
        self._end(lambda: self.queue.fail(actions))

    def abandon(self, error: RanksLostError) -> None:
        """Do the same as close() when members have ended and engine calls fail."""
        self.queue.abandon(error)
        self._end(lambda: self.queue.end_pending(error))

    def _end(self, fail: Callable[[], None]) -> None:
        if self._thread is not None:
            self._thread.join()
        self.queue.close_alarm()
        with self.turn:
            fail()
            for closer in self._closers:
                closer()
            self.communicator.close()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Submission:
    """An operation that is prepared for a channel, and may have been submitted.

    Its output is that of `convert`, called with the result, or what was given, or else the result.
    """

    channel: Channel
    operation: Operation
    convert: Callable[[Any], Any] | None = None
    output: Any = None

    def after(self, streams: Streams) -> Submission:
        """Order it after the work on the current stream of a device."""
        self.operation.streams, self.operation.mark = streams, streams.mark()
        return self

    @collective
    def start(self) -> Self:
        """Submit the operation (in any order)."""
        self.channel.submit(self.operation)
        return self

    def done(self) -> bool:
        """Return whether the operation is complete, including its work on a device."""
        operation = self.operation
        return self.channel.poll(operation) and operation.streams.done(operation.finished)

    def wait(self) -> Any:
        """Wait for the output or the error, even after shutdown(); on a device, its stream does."""
        operation = self.operation
        if not operation.done:
            with self.channel.blocked.running():
                self.channel.wait(operation)
        if operation.streams is not HOST:
            operation.streams.wait(operation.finished)
        return self._converted(operation.outcome())

    @collective
    def run(self) -> Any:
        operation = self.operation
        result = self.channel.run(operation)
        if operation.streams is not HOST:
            operation.streams.wait(operation.finished)
        return self._converted(result) if self.convert or self.output is None else self.output

    def _converted(self, result: object) -> Any:
        if self.convert is not None:
            self.output, self.convert = self.convert(result), None
        return result if self.output is None else self.output


T = TypeVar("T")


class FirstUse:
    """Values on which the ranks of a channel agree once, by key.

    One thread of a rank makes an agreement while the others that need it wait. Ranks whose threads
    arrive in different orders cannot block one another if the names of all operations of an
    agreement depend only on its key, because operations are matched by name whichever thread
    submits them.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # By key: who holds the lock makes the agreement, whose value is then in the list.
        self._agreements: WeakKeyDictionary[
            Channel, dict[Hashable, tuple[threading.Lock, list[Any]]]
        ] = WeakKeyDictionary()

    @collective
    def settle(self, channel: Channel, key: Hashable, agree: Callable[[], T]) -> T:
        """Return the value of a key, calling `agree` on first use (collective then)."""
        with self._guard:
            agreements = self._agreements.setdefault(channel, {})
            lock, values = agreements.setdefault(key, (threading.Lock(), []))
        with lock:
            if not values:
                values.append(agree())
        value: T = values[0]
        return value

    def find(self, channel: Channel, key: Hashable) -> Any:
        """Return the value of a key, or None if it is not settled."""
        with self._guard:
            _, values = self._agreements.get(channel, {}).get(key, (None, []))
        return values[0] if values else None


# What frameworks keep of their calls, by keys of their own, as long as a context and its channels.
KNOWN_CALLS: dict[Hashable, Any] = {}

# Programs that give each call another name must not fill the memory.
_MOST_CALLS = 2048


def keep_call(known: Any, channel: Channel, *keys: Hashable) -> None:
    """Keep what is known of a call for others on its channel, unless there are too many."""
    if len(KNOWN_CALLS) < _MOST_CALLS:
        KNOWN_CALLS.update(dict.fromkeys(keys, known))
        if channel.queue.closed:  # meanwhile, by another thread, which may have cleared them before
            KNOWN_CALLS.clear()
