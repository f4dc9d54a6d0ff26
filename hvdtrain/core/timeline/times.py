"""The records of a rank: timestamps, to be formatted later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import BucketTimes
from hvdtrain.engines.communicator import Communicator

_BARRIERS = 10


@dataclass(frozen=True)
class Reading:
    """A measurement of the offset."""

    at_seconds: float
    offset_seconds: float
    error_seconds: float


@collective
def read_clock(communicator: Communicator) -> Reading:
    """Measure the offset of this rank's clock from rank 0's."""
    own = np.empty((_BARRIERS, 2))
    for barrier in own:
        barrier[0] = time.perf_counter()
        communicator.barrier()
        barrier[1] = time.perf_counter()
    root = own.copy()
    communicator.broadcast(Buffer.from_array(root), 0)
    return Reading(time.perf_counter(), *offset(own, root))


def offset(own: npt.NDArray[np.float64], root: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return a clock's offset and maximum error from [n_barriers, 2] times of entry and exit."""
    low = float((own[:, 0] - root[:, 1]).max())
    high = float((own[:, 1] - root[:, 0]).min())
    middle = 0.0 if low <= 0.0 <= high else (low + high) / 2
    return middle, max(abs(high - middle), abs(low - middle))


def root_clock(start: Reading, stop: Reading) -> Callable[[float], float]:
    """Return a function that converts times of this rank's clock to times of rank 0's."""
    duration = stop.at_seconds - start.at_seconds
    drift = (stop.offset_seconds - start.offset_seconds) / duration if duration > 0 else 0.0
    return lambda seconds: seconds - start.offset_seconds - drift * (seconds - start.at_seconds)


T = TypeVar("T")

# A record takes about 500 bytes of memory, and browsers can still show this many.
_MOST_RECORDS = 100_000


class Records(Generic[T]):
    """A list of limited size; another thread takes its entries, and a count of those beyond it."""

    def __init__(self, entries: Iterable[T] = (), most: int = _MOST_RECORDS) -> None:
        self.kept: list[T] = list(entries)
        self.dropped = 0
        self._most = most
        self._fresh: deque[T] = deque()

    def append(self, entry: T) -> None:
        """Append an entry, or count it if the list is full."""
        self._fresh.append(entry)
        if len(self.kept) < self._most:
            self.kept.append(entry)
        else:
            self.dropped += 1

    def take(self) -> Records[T]:
        """Return the entries since the last call; other threads may append meanwhile."""
        return Records([self._fresh.popleft() for _ in range(len(self._fresh))])


class OperationTimes(NamedTuple):
    """Timestamps of an operation, in seconds of this rank's clock; None if not reached.

    `proposed` is when it first took part in a round.
    """

    operation: str
    name: str
    op: str
    nbytes: int
    submitted: float
    proposed: float | None
    agreed: float | None
    began: float | None
    ended: float
    error: str


class RecoveryTimes(NamedTuple):
    """A recovery from the loss of ranks, in seconds of this rank's clock.

    `lost` are the ranks, as they were numbered before, and `size_before` was their number.
    """

    began: float
    ended: float
    lost: tuple[int, ...]
    size_before: int


class JoinTimes(NamedTuple):
    """The joining of ranks, in seconds of this rank's clock.

    `joined` are these ranks, and `size` is the number of ranks since then.
    """

    began: float
    ended: float
    joined: tuple[int, ...]
    size: int


@dataclass
class ChannelTimes:
    """Records of a channel of a process set; `rounds` are the starts of rounds of agreement."""

    label: str
    process_set: str
    operations: Records[OperationTimes] = field(default_factory=Records)
    buckets: Records[BucketTimes] = field(default_factory=Records)
    rounds: Records[float] = field(default_factory=Records)

    def take(self) -> ChannelTimes:
        return ChannelTimes(
            self.label,
            self.process_set,
            self.operations.take(),
            self.buckets.take(),
            self.rounds.take(),
        )


@dataclass
class RankRecords:
    start: Reading
    stop: Reading
    zero_seconds: float
    channels: list[ChannelTimes] = field(default_factory=list)
    blocked: Records[tuple[float, float]] = field(default_factory=Records)
    recoveries: Records[RecoveryTimes] = field(default_factory=Records)
    joins: Records[JoinTimes] = field(default_factory=Records)

    def take(self) -> RankRecords:
        channels = [channel.take() for channel in list(self.channels)]
        return RankRecords(
            self.start,
            self.stop,
            self.zero_seconds,
            channels,
            self.blocked.take(),
            self.recoveries.take(),
            self.joins.take(),
        )

    @property
    def dropped(self) -> int:
        """The number of records beyond the limits."""
        channels = ((c.operations, c.buckets, c.rounds) for c in self.channels)
        return self.blocked.dropped + sum(r.dropped for records in channels for r in records)
