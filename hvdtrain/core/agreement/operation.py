"""Operations of a channel: what its members run together, and the outcome."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.request import Request
from hvdtrain.engines.communicator import Communicator
from hvdtrain.streams import HOST, Mark, Streams

# A program that has polled an operation for this long counts as waiting for it.
_POLL_SECONDS = 1.0


class AgreedError(Exception):
    """An error in `Operation.execute` that all members raise in the same way.

    Any other error may concern one member only, while the others are still inside the engine.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@collective
def maxima(communicator: Communicator, votes: bytes) -> bytes:
    """Return the maxima of all members' votes, 8 bytes each."""
    values = np.frombuffer(bytearray(votes), np.uint64)
    communicator.start_max(values).wait()
    return values.tobytes()


class BucketTimes(NamedTuple):
    """Timestamps of a bucket of an optimizer step, in seconds of this rank's clock.

    `free` is when the channel was ready for it, and `filled` when its last gradient was.
    """

    number: int
    nbytes: int
    free: float
    filled: float
    began: float
    ended: float


class Operation(ABC):
    """An operation that all members of a channel run together."""

    request: Request
    streams: Streams = HOST
    mark: Mark = None
    finished: Mark = None
    # As class attributes they cost nothing when an operation is made.
    done = False
    submitted = 0.0
    waiters = 0
    _polls_since = _polled = -_POLL_SECONDS
    _result: object = None
    _error: BaseException | None = None
    _buffers: Sequence[Buffer] = ()
    batch_key: Hashable = None  # equal for operations that can run as one batch

    def end(self, result: object = None, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self.done = True

    @property
    def failed(self) -> bool:
        return self._error is not None

    def outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank contributes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def awaited_since(self) -> float | None:
        """Return since when it has been waiting for other ranks; None while it needs this rank."""
        return self.submitted

    def note_poll(self) -> None:
        """Record that this rank's program has polled the operation."""
        now = time.perf_counter()
        if now - self._polled >= _POLL_SECONDS:
            self._polls_since = now
        self._polled = now

    def is_awaited(self, now: float) -> bool:
        """Return whether this rank's program waits for it, at `now` (time.perf_counter)."""
        polls = now - self._polled < _POLL_SECONDS
        return self.waiters > 0 or (polls and now - self._polls_since >= _POLL_SECONDS)

    def abandon(self) -> None:  # noqa: B027  # most operations need nothing from the program
        """Complete it without this rank's program, which will do nothing more for it."""

    def end_pass(self) -> None:  # noqa: B027  # most operations have nothing to do with it
        """Note the end of a backward pass: what was not filled in it may never be."""

    def buckets(self) -> Sequence[BucketTimes]:
        """Return the timestamps of its buckets that have been reduced, if it has any."""
        return ()

    @collective
    def run(self, communicator: Communicator) -> Any:
        """Execute it in the order of its device's streams; see `execute`."""
        if self.streams is HOST:
            return self.execute(communicator)
        work = partial(self.execute, communicator)
        result, self.finished = self.streams.run_after(self.mark, work)
        return result

    @abstractmethod
    @collective
    def execute(self, communicator: Communicator) -> Any:
        """Run the operation and return its result (collective; all members have agreed on it)."""

    @collective
    def execute_batch(
        self,
        others: Sequence[Operation],
        communicator: Communicator,
        allocate: Callable[[], Buffer],
    ) -> None:
        """Run this and others of equal `batch_key` as one, packed into memory of the engine."""
        raise NotImplementedError

    @collective
    def vote(self, others: Sequence[Operation], communicator: Communicator, votes: bytes) -> bytes:
        """Vote on this and others of equal `batch_key`; return the maxima of all members' votes.

        The result is b"" if all vote in this way for the same, and the operations are complete.
        """
        return maxima(communicator, votes)


class Marker(Operation):
    """A request without data: this rank leaves, has joined, or has reached some point."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request

    def execute(self, communicator: Communicator) -> None:
        pass
