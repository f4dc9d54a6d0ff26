"""A communicator with a queue: operations are agreed on, and then run in the same order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from hvdtrain.collective import collective
from hvdtrain.core.agreement.driver import Driver, Driving
from hvdtrain.core.agreement.operation import Marker, Operation
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.core.agreement.request import JOIN, LEAVE, UNNAMED, Request
from hvdtrain.core.agreement.votes import Prepared
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import RanksLostError


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
        self.has_thread = communicator.capabilities.concurrent
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._left: Operation | None = None
        self._closers: list[Callable[[], None]] = []
        self.queue = queue = Queue(communicator.size, title)
        self.waiting, self.call_listeners = queue.waiting, queue.call_listeners
        self.listen, self.unlisten = queue.listen, queue.unlisten
        driver = Driver(communicator, queue, ranks, title, answer, self._counts.clear)
        self._driving = Driving(driver, queue, title, failed, lost, self.has_thread)

    @collective
    def submit(self, operation: Operation, at_once: bool = False) -> None:
        """Submit an operation without waiting for it (in any order)."""
        self.queue.add(operation)
        if self.has_thread:
            if at_once:
                self.queue.hurry()
        elif self.communicator.size == 1:
            self.wait(operation)

    @collective
    def run(self, operation: Operation) -> Any:
        operation.waiters = 1
        try:
            self.queue.add(operation)
            self._driving.wait(operation)
        except BaseException:
            self.queue.wake_drivers()  # a signal's handler may raise before this thread drives
            raise
        return operation.outcome()

    @collective
    def run_prepared(self, prepared: Prepared, data: object) -> bool:
        """Run a prepared operation, which others may have submitted, if nothing else is pending."""
        return self._driving.run_prepared(prepared, data)

    @collective
    def wait(self, operation: Operation) -> Any:
        with self.queue.waiting(operation):
            self._driving.wait(operation)
        return operation.outcome()

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
        return str(name) if name else f"{UNNAMED}{self.count(operation)}"

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
        marker = Marker(request)
        self.submit(marker)
        for operation in self.queue.operations():
            operation.abandon()
        return marker

    def before_closing(self, release: Callable[[], None]) -> None:
        """Register a function for close() to call before it closes the communicator."""
        self._closers.append(release)

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
        self._driving.end_thread()
        self.queue.release()
        with self._driving.turn:
            fail()
            for release in self._closers:
                release()
            self.communicator.close()


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
        self._agreements: WeakKeyDictionary[Channel, dict[Hashable, _Agreement]] = (
            WeakKeyDictionary()
        )

    @collective
    def settle(self, channel: Channel, key: Hashable, agree: Callable[[], T]) -> T:
        """Return the value of a key, calling `agree` on first use (collective then)."""
        with self._guard:
            agreements = self._agreements.setdefault(channel, {})
            agreement = agreements.setdefault(key, _Agreement())
        with agreement.lock:
            if not agreement.settled:
                agreement.value = agree()
                agreement.settled = True
        value: T = agreement.value
        return value

    def find(self, channel: Channel, key: Hashable) -> Any:
        """Return the value of a key, or None if it is not settled."""
        with self._guard:
            agreement = self._agreements.get(channel, {}).get(key)
        return None if agreement is None else agreement.value


class _Agreement:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.settled = False
        self.value: Any = None
