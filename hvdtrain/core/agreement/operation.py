"""What the members of a channel do together, and how it ends."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.request import Request
from hvdtrain.engines.communicator import Communicator
from hvdtrain.streams import HOST, Mark, Streams

__all__ = ["AgreedError", "BucketTimes", "Marker", "Operation"]

# A program that goes on asking whether an operation is done, waits for it as one that blocks.
_POLL_SECONDS = 1.0


class AgreedError(Exception):
    """What `Operation.execute` raises for an error that all members meet alike.

    Any other error may be one member's alone, and then the others are still inside the engine.

    Args:
        error: how the operation ends.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class BucketTimes(NamedTuple):
    """When a bucket of an optimizer step got where, in seconds of this rank's clock.

    `free` is when the channel turned to it, `filled` when its last gradient was there.
    """

    number: int
    nbytes: int
    free: float
    filled: float
    began: float
    ended: float


class Operation(ABC):
    """Something that all members of a channel do together.

    Attributes:
        request: what the members agree on.
        done: whether it has ended on this rank, well or badly.
        submitted: when it was (time.perf_counter).
        waiters: how many threads of this rank's program are blocked in it.
        streams: the order of work on the device of its buffers.
        mark: what it comes after there.
        finished: what comes after it there, when it is done.
    """

    request: Request
    streams: Streams = HOST
    mark: Mark = None
    finished: Mark = None
    _buffers: Sequence[Buffer] = ()

    def __init__(self) -> None:
        self.done = False
        self.submitted = 0.0
        self.waiters = 0
        self._polls_since = self._polled = -_POLL_SECONDS
        self._result: Any = None
        self._error: BaseException | None = None

    def end(self, result: Any, error: BaseException | None) -> None:
        """Note how it ended."""
        self._result, self._error = result, error
        self.done = True

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    def outcome(self) -> Any:
        """Return the result of an operation that is done, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def nbytes(self) -> int:
        """How many bytes this rank contributes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def awaited_since(self) -> float | None:
        """Return since when it waits for other ranks only; None while for this rank's program."""
        return self.submitted

    def note_poll(self) -> None:
        """Note that this rank's program has asked whether it is done."""
        now = time.perf_counter()
        if now - self._polled >= _POLL_SECONDS:
            self._polls_since = now
        self._polled = now

    def is_awaited(self, now: float) -> bool:
        """Return whether this rank's program waits for it (`now` is time.perf_counter())."""
        polls = now - self._polled < _POLL_SECONDS
        return self.waiters > 0 or (polls and now - self._polls_since >= _POLL_SECONDS)

    def abandon(self) -> None:  # noqa: B027  # most operations wait for nobody
        """Learn that this rank's program will do nothing more for it."""

    def buckets(self) -> Sequence[BucketTimes]:
        """Return when the buckets were reduced that it consists of, if any."""
        return ()

    def run(self, communicator: Communicator) -> Any:
        """Do it in the order of its device's streams; see `execute`."""
        if self.streams is HOST:
            return self.execute(communicator)
        work = partial(self.execute, communicator)
        result, self.finished = self.streams.run_after(self.mark, work)
        return result

    @abstractmethod
    def execute(self, communicator: Communicator) -> Any:
        """Do it, when all members are known to have arrived; return the result.

        Raises:
            AgreedError: all members meet this error, and none is left inside the engine.
        """

    def batch_key(self) -> Hashable:
        """Return what operations share that `execute_batch` does together; None for none."""
        return None

    def execute_batch(
        self,
        others: Sequence[Operation],
        communicator: Communicator,
        memory: Buffer,
    ) -> None:
        """Do it together with others, by way of `memory` (bytes that the engine has handed out)."""
        raise NotImplementedError


class Marker(Operation):
    """A request without data: that this rank leaves, has joined, or is at some point."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request

    def execute(self, communicator: Communicator) -> Any:
        return None
