"""Operations of a channel, and the requests that describe them, on which ranks agree."""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from sys import byteorder
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import Communicator, VoteCalls
from hvdtrain.streams import HOST, Mark, Streams
from hvdtrain.types import DType, ReduceOp


@dataclass(frozen=True)
class Zeros:
    """The parameters with which a joined rank takes part in a reduction, contributing zeros."""

    buffers: tuple[tuple[int, DType], ...]
    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    devices: tuple[str, ...] = ()
    half: str = ""


@dataclass(frozen=True)
class Request:
    """The description of an operation, which must be equal on all ranks."""

    operation: str
    name: str = ""
    details: tuple[tuple[str, str], ...] = ()
    zeros: Zeros | None = field(default=None, compare=False)
    instead: str = field(default="", compare=False)

    @cached_property
    def key(self) -> str:
        """The key by which requests of different ranks are matched."""
        return f"{self.operation}.{self.name}"

    @property
    def subject(self) -> str:
        """The operation and its name, for messages."""
        named = self.name and not self.name.startswith(UNNAMED)
        return f"{self.operation} {self.name!r}" if named else self.operation

    def __str__(self) -> str:
        details = ", ".join(f"{key} {value}" for key, value in self.details)
        return f"{self.subject} ({details})" if details else self.subject

    @cached_property
    def packed(self) -> bytes:
        return pickle.dumps((self.operation, self.name, self.details, self.zeros, self.instead))

    @cached_property
    def ballot(self) -> bytes:
        """A hash of the request and the complement of the hash, 16 bytes in all."""
        return self._ballot_of(self.name)

    def _ballot_of(self, name: str) -> bytes:
        number = name.removeprefix(UNNAMED)
        if number == name or not number.isdecimal() or number != str(int(number)):
            hasher = self._beginning.copy()
            hasher.update(name.encode())
            return _with_complement(hasher.digest())
        # As node/calls.h does it.
        hashed = (self._unnumbered + int(number) * 0x9E3779B97F4A7C15) % (1 << 64)
        return _with_complement(hashed.to_bytes(_HASH_BYTES, byteorder))

    @cached_property
    def _unnumbered(self) -> int:
        return int.from_bytes(self._beginning.digest(), byteorder)

    @cached_property
    def _beginning(self) -> blake2b:
        return _hasher(self.operation, self.details)

    def renamed(self, name: str) -> Request:
        made = object.__new__(Request)
        # A frozen dataclass sets its attributes one by one, which takes longer.
        made.__dict__.update(
            operation=self.operation,
            name=name,
            details=self.details,
            zeros=self.zeros,
            instead=self.instead,
            _beginning=self._beginning,
            key=f"{self.operation}.{name}",
            ballot=self._ballot_of(name),
        )
        return made


def ballot(ballots: Sequence[bytes]) -> bytes:
    """Return the ballot of a list of requests: a hash of their ballots, and its complement."""
    if len(ballots) == 1:
        return ballots[0]
    return _with_complement(blake2b(b"".join(ballots), digest_size=_HASH_BYTES).digest())


def _with_complement(hashed: bytes) -> bytes:
    return hashed + hashed.translate(_COMPLEMENT)


# A training loop submits the same requests again and again, or with other numbers.
@lru_cache(maxsize=4096)
def _hasher(operation: str, details: tuple[tuple[str, str], ...]) -> blake2b:
    """Return a hasher of what precedes the name; to be copied."""
    texts = [operation, *(text for pair in details for text in pair), ""]
    return blake2b("\0".join(texts).encode(), digest_size=_HASH_BYTES)


@lru_cache(maxsize=4096)
def unpacked(text: bytes) -> Request:
    """Return the request that another rank has packed."""
    return Request(*pickle.loads(text))


_HASH_BYTES = 8
_COMPLEMENT = bytes(reversed(range(256)))

# The prefix of names given to operations without one.
UNNAMED = "noname."

# The detail that counts the steps of a rank's program.
STEPS = "step"

JOIN = Request("join")
LEAVE = Request("leave the job")

# The vote of a member that has no request, but listens for blocked members; never reported.
LISTEN = Request("listen")


def device_types(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    """Return the type of each buffer's device, e.g. "cuda" for "cuda:1"."""
    return tuple(buffer.device.partition(":")[0] for buffer in buffers)


def device_details(devices: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the details of a request about devices; empty if all buffers are in host memory.

    Engines communicate each kind of memory differently: a member with a tensor on the CPU and one
    with a tensor on a GPU would wait for each other forever.
    """
    if all(device == "cpu" for device in devices):
        return ()
    return (("device", ", ".join(devices)),)


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


class Work(Operation):
    """A request on which ranks agree, and what all of them do then, if anything."""

    def __init__(
        self,
        request: Request,
        work: Callable[[Communicator], Any] | None = None,
        buffers: Sequence[Buffer] = (),
    ) -> None:
        self.request, self._work, self._buffers = request, work, buffers

    def execute(self, communicator: Communicator) -> Any:
        return None if self._work is None else self._work(communicator)


class Repeatable(Protocol):
    """What operations have in common that differ in their data only."""

    request: Request  # without a name if they are numbered
    vote_calls: VoteCalls | None

    @collective
    def finish(self, verdict: int) -> bytes:
        """Complete what the calls have begun, as `Operation.vote` does."""

    def operation(self, name: str, source: Any, target: Any, read: int, written: int) -> Operation:
        """Return the operation that has begun on two tensors, given their addresses."""
