"""The records of a rank: timestamps, and the events in Chrome's trace format that they become."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import BucketTimes, Request
from hvdtrain.engines.communicator import Communicator
from hvdtrain.topology import format_ranks

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


class Change(NamedTuple):
    """A loss or joining of ranks, in seconds of this rank's clock, and what its mark says."""

    began: float
    ended: float
    text: str
    args: dict[str, object]


@dataclass
class ChannelTimes:
    """Records of a channel of a process set; `rounds` are the starts of rounds of agreement."""

    label: str
    process_set: str
    operations: Records[OperationTimes] = field(default_factory=Records)
    buckets: Records[BucketTimes] = field(default_factory=Records)
    rounds: Records[float] = field(default_factory=Records)

    def take(self) -> ChannelTimes:
        operations, buckets = self.operations.take(), self.buckets.take()
        return replace(self, operations=operations, buckets=buckets, rounds=self.rounds.take())


@dataclass
class RankRecords:
    start: Reading
    stop: Reading
    zero_seconds: float
    channels: list[ChannelTimes] = field(default_factory=list)
    blocked: Records[tuple[float, float]] = field(default_factory=Records)
    changes: Records[Change] = field(default_factory=Records)

    def take(self) -> RankRecords:
        channels = [channel.take() for channel in list(self.channels)]
        blocked, changes = self.blocked.take(), self.changes.take()
        return replace(self, channels=channels, blocked=blocked, changes=changes)

    def note_lost(self, began: float, ended: float, lost: Sequence[int], size: int) -> None:
        """Note which of `size` ranks were lost, as they were numbered before."""
        if lost:
            args = {"lost": list(lost), "ranks before": size}
            text = f"{format_ranks(lost)} of {size} lost"
            self.changes.append(Change(began, ended, text, args))

    def note_joined(self, began: float, ended: float, joined: Sequence[int], size: int) -> None:
        """Note which ranks have joined, and the number of ranks since then."""
        if joined:
            args = {"joined": list(joined), "ranks": size}
            self.changes.append(Change(began, ended, f"{format_ranks(joined)} joined", args))

    @property
    def dropped(self) -> int:
        """The number of records beyond the limits."""
        channels = ((c.operations, c.buckets, c.rounds) for c in self.channels)
        return self.blocked.dropped + sum(r.dropped for records in channels for r in records)


Phase = tuple[str, float, float]


class Item(NamedTuple):
    """An operation, bucket or wait, whose phases follow one another without gaps."""

    subject: str
    phases: Sequence[Phase]
    args: dict[str, object]


# Items of one kind, which may overlap, with a label and marks.
_Row = tuple[str, Iterable[Item], Sequence[float]]


def _rows_of(times: RankRecords) -> Iterator[_Row]:
    """Yield the rows of a rank, with that of its program first."""
    blocked = (Item("", [("blocked", *interval)], {}) for interval in times.blocked.kept)
    yield "training thread", blocked, ()
    for channel in times.channels:
        operations = (_operation(o, channel) for o in channel.operations.kept)
        yield channel.label, operations, channel.rounds.kept
        if channel.buckets.kept:
            buckets = (_bucket(b, channel) for b in channel.buckets.kept)
            yield f"{channel.label}: buckets", buckets, ()


def _phases(times: OperationTimes) -> list[Phase]:
    """Return the phases of an operation, up to the last one that it has reached."""
    phases = []
    start = times.submitted
    for phase, reached in (
        ("queue", times.proposed),
        ("negotiation", times.agreed),
        ("queue", times.began),
        ("moving", times.ended),
    ):
        end = times.ended if reached is None else reached
        if phase != "queue" or end > start or reached is None:
            phases.append((phase, start, end))
        if reached is None:
            break
        start = end
    return phases


def _operation(times: OperationTimes, channel: ChannelTimes) -> Item:
    args = {
        "operation": times.operation,
        "name": times.name,
        "op": times.op,
        "bytes": times.nbytes,
        "process set": channel.process_set,
        "error": times.error,
    }
    said = {key: value for key, value in args.items() if value != ""}
    subject = Request(times.operation, times.name).subject
    return Item(subject, _phases(times), said)


def _bucket(times: BucketTimes, channel: ChannelTimes) -> Item:
    name = f"bucket {times.number}"
    args = {"name": name, "bytes": times.nbytes, "process set": channel.process_set}
    # The channel waits for it, or it waits for the channel.
    waiting = [("waiting", times.free, times.filled)] if times.filled > times.free else []
    queue, moving = ("queue", times.filled, times.began), ("moving", times.began, times.ended)
    return Item(name, [*waiting, queue, moving], args)


Event = dict[str, object]


class RankEvents:
    """The events of a rank, a process in the trace whose rows are threads.

    Items of a row that overlap are in several lanes, as few as there can be.
    """

    def __init__(self, times: RankRecords, rank: int, host: str) -> None:
        self._clock = root_clock(times.start, times.stop)
        self._zero_seconds = times.zero_seconds
        self._rank, self._host = rank, host
        self._ends: dict[str, list[float]] = {}  # of each lane of the rows with a label
        self._threads: dict[tuple[str, int], int] = {}

    def add(self, times: RankRecords) -> Iterator[Event]:
        """Yield the events of final records, which may be a part of all."""
        for row in _rows_of(times):
            yield from self._row(row, self._ends.setdefault(row[0], []))
        for change in times.changes.kept:
            mark = self._instant(change.text, "p", change.began, 1)
            seconds = round(change.ended - change.began, 6)
            yield {**mark, "args": {**change.args, "seconds": seconds}}
        if times.dropped:
            text = f"{times.dropped} records dropped: record a shorter time"
            yield self._instant(text, "p", times.stop.at_seconds, 1)

    def passing(self, times: RankRecords) -> Iterator[Event]:
        """Yield the events of records that later ones replace, and the metadata of all rows."""
        for row in _rows_of(times):
            yield from self._row(row, list(self._ends.get(row[0], [])))
        yield from self.metadata()

    def metadata(self) -> Iterator[Event]:
        """Yield the events that name the process after the rank and its host, and all rows."""
        yield self._metadata("process_name", 0, name=f"rank {self._rank} ({self._host})")
        yield self._metadata("process_sort_index", 0, sort_index=self._rank)
        for (label, lane), thread in self._threads.items():
            name = label if lane == 1 else f"{label} ({lane})"
            yield self._metadata("thread_name", thread, name=name)
            yield self._metadata("thread_sort_index", thread, sort_index=thread)

    def _row(self, row: _Row, ends: list[float]) -> Iterator[Event]:
        label, items, marks = row
        first = self._thread(label, 1)
        for item in sorted(items, key=lambda item: item.phases[0][1]):
            start = item.phases[0][1]
            lane = next((n for n, end in enumerate(ends) if end <= start), len(ends))
            ends[lane : lane + 1] = [item.phases[-1][2]]
            yield from self._slices(item, self._thread(label, lane + 1))
        for moment in marks:
            yield self._instant("round", "t", moment, first)

    def _thread(self, label: str, lane: int) -> int:
        return self._threads.setdefault((label, lane), len(self._threads) + 1)

    def _slices(self, item: Item, thread: int) -> Iterator[Event]:
        """Yield an event for each phase of an item."""
        for phase, start, end in item.phases:
            began = self._nanoseconds(start)
            yield {
                "name": f"{phase} {item.subject}".rstrip(),
                "cat": phase,
                "ph": "X",
                "ts": began / 1000,
                "dur": (self._nanoseconds(end) - began) / 1000,
                "pid": self._rank,
                "tid": thread,
                "args": item.args,
            }

    def _instant(self, name: str, scope: str, seconds: float, thread: int) -> Event:
        at = {"ts": self._nanoseconds(seconds) / 1000, "pid": self._rank, "tid": thread}
        return {"name": name, "ph": "i", "s": scope, **at}

    def _metadata(self, kind: str, thread: int, **args: object) -> Event:
        return {"name": kind, "ph": "M", "pid": self._rank, "tid": thread, "args": args}

    def _nanoseconds(self, seconds: float) -> int:
        return round((self._clock(seconds) - self._zero_seconds) * 1e9)
