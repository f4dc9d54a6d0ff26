"""What one rank has recorded: numbers as they are, to be formatted later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from hvdtrain.core.agreement.operation import BucketTimes
from hvdtrain.core.timeline.clock import Reading

__all__ = ["BucketTimes", "ChannelTimes", "OperationTimes", "RankRecords", "Records"]

T = TypeVar("T")

# A record takes about half a kilobyte of memory, and a browser still opens so many.
_MOST_RECORDS = 100_000


class Records(Generic[T]):
    """A list that keeps its first entries, and counts those for which there is no room.

    Another thread takes every entry from time to time, also those for which there is no room.

    Args:
        entries: the first ones, which nobody takes.
        most: how many are kept.

    Attributes:
        kept: the entries.
        dropped: how many came when it was full.
    """

    def __init__(self, entries: Iterable[T] = (), most: int = _MOST_RECORDS) -> None:
        self.kept: list[T] = list(entries)
        self.dropped = 0
        self._most = most
        self._fresh: deque[T] = deque()

    def append(self, entry: T) -> None:
        """Keep an entry, or count it."""
        self._fresh.append(entry)
        if len(self.kept) < self._most:
            self.kept.append(entry)
        else:
            self.dropped += 1

    def take(self) -> Records[T]:
        """Return what has been appended since the last call; others may append meanwhile."""
        return Records([self._fresh.popleft() for _ in range(len(self._fresh))])


class OperationTimes(NamedTuple):
    """When an operation got where, in seconds of this rank's clock; None where it did not.

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


@dataclass
class ChannelTimes:
    """Of one channel, in a process set; `rounds` is when rounds of agreement began."""

    label: str
    process_set: str
    operations: Records[OperationTimes] = field(default_factory=Records)
    buckets: Records[BucketTimes] = field(default_factory=Records)
    rounds: Records[float] = field(default_factory=Records)

    def take(self) -> ChannelTimes:
        """Return what has been recorded since the last call."""
        return ChannelTimes(
            self.label,
            self.process_set,
            self.operations.take(),
            self.buckets.take(),
            self.rounds.take(),
        )


@dataclass
class RankRecords:
    """Of one rank.

    Attributes:
        start: the clock when the recording began.
        stop: the clock when it ended.
        zero_seconds: when the first rank began, on rank 0's clock.
        channels: the channels, also those that have been closed meanwhile.
        blocked: from when to when the program was blocked on communication.
    """

    start: Reading
    stop: Reading
    zero_seconds: float
    channels: list[ChannelTimes] = field(default_factory=list)
    blocked: Records[tuple[float, float]] = field(default_factory=Records)

    def take(self) -> RankRecords:
        """Return what has been recorded since the last call."""
        channels = [channel.take() for channel in list(self.channels)]
        return RankRecords(self.start, self.stop, self.zero_seconds, channels, self.blocked.take())

    @property
    def dropped(self) -> int:
        """How many records there was no room for."""
        channels = ((c.operations, c.buckets, c.rounds) for c in self.channels)
        return self.blocked.dropped + sum(r.dropped for records in channels for r in records)
