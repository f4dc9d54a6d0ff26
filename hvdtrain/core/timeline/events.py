"""Events of one rank in Chrome's trace event format (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.core.agreement.operation import BucketTimes, Request
from hvdtrain.core.timeline.times import (
    ChannelTimes,
    JoinTimes,
    OperationTimes,
    RankRecords,
    RecoveryTimes,
    root_clock,
)
from hvdtrain.topology import format_ranks

Phase = tuple[str, float, float]


@dataclass(frozen=True)
class Item:
    """An operation, bucket or wait, whose phases follow one another without gaps."""

    subject: str
    phases: Sequence[Phase]
    args: dict[str, object]

    @property
    def start(self) -> float:
        return self.phases[0][1]

    @property
    def end(self) -> float:
        return self.phases[-1][2]


@dataclass(frozen=True)
class TraceRow:
    """Items of one kind, which may overlap."""

    label: str
    items: Iterable[Item]
    marks: Sequence[float] = ()


def _rows_of(times: RankRecords) -> Iterator[TraceRow]:
    """Yield the rows of a rank, with that of its program first."""
    blocked = (Item("", [("blocked", *interval)], {}) for interval in times.blocked.kept)
    yield TraceRow("training thread", blocked)
    for channel in times.channels:
        operations = (_operation(o, channel) for o in channel.operations.kept)
        yield TraceRow(channel.label, operations, channel.rounds.kept)
        if channel.buckets.kept:
            buckets = (_bucket(b, channel) for b in channel.buckets.kept)
            yield TraceRow(f"{channel.label}: buckets", buckets)


def operation_phases(times: OperationTimes) -> list[Phase]:
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


def bucket_phases(times: BucketTimes) -> list[Phase]:
    """Return the phases of a bucket: the channel waits for it, or it waits for the channel."""
    waiting = [("waiting", times.free, times.filled)] if times.filled > times.free else []
    queue, moving = ("queue", times.filled, times.began), ("moving", times.began, times.ended)
    return [*waiting, queue, moving]


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
    return Item(subject, operation_phases(times), said)


def _bucket(times: BucketTimes, channel: ChannelTimes) -> Item:
    name = f"bucket {times.number}"
    args = {"name": name, "bytes": times.nbytes, "process set": channel.process_set}
    return Item(name, bucket_phases(times), args)


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
            yield from self._row(row, self._ends.setdefault(row.label, []))
        yield from self._changes(times)
        if times.dropped:
            text = f"{times.dropped} records dropped: record a shorter time"
            yield self._instant(text, "p", times.stop.at_seconds, 1)

    def passing(self, times: RankRecords) -> Iterator[Event]:
        """Yield the events of records that later ones replace, and the metadata of all rows."""
        for row in _rows_of(times):
            yield from self._row(row, list(self._ends.get(row.label, [])))
        yield from self.metadata()

    def metadata(self) -> Iterator[Event]:
        """Yield the events that name the process after the rank and its host, and all rows."""
        yield self._metadata("process_name", 0, name=f"rank {self._rank} ({self._host})")
        yield self._metadata("process_sort_index", 0, sort_index=self._rank)
        for (label, lane), thread in self._threads.items():
            name = label if lane == 1 else f"{label} ({lane})"
            yield self._metadata("thread_name", thread, name=name)
            yield self._metadata("thread_sort_index", thread, sort_index=thread)

    def _row(self, row: TraceRow, ends: list[float]) -> Iterator[Event]:
        first = self._thread(row.label, 1)
        for item in sorted(row.items, key=lambda item: item.start):
            lane = next((n for n, end in enumerate(ends) if end <= item.start), len(ends))
            ends[lane : lane + 1] = [item.end]
            yield from self._slices(item, self._thread(row.label, lane + 1))
        for moment in row.marks:
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

    def _changes(self, times: RankRecords) -> Iterator[Event]:
        """Yield the marks of losses and joinings of ranks, for the whole rank."""
        for loss in times.recoveries.kept:
            text = f"{format_ranks(loss.lost)} of {loss.size_before} lost"
            args = {"lost": list(loss.lost), "ranks before": loss.size_before}
            yield self._change(text, args, loss)
        for join in times.joins.kept:
            args = {"joined": list(join.joined), "ranks": join.size}
            yield self._change(f"{format_ranks(join.joined)} joined", args, join)

    def _change(
        self, text: str, args: dict[str, object], times: RecoveryTimes | JoinTimes
    ) -> Event:
        seconds = round(times.ended - times.began, 6)
        mark = self._instant(text, "p", times.began, 1)
        return {**mark, "args": {**args, "seconds": seconds}}

    def _instant(self, name: str, scope: str, seconds: float, thread: int) -> Event:
        at = {"ts": self._nanoseconds(seconds) / 1000, "pid": self._rank, "tid": thread}
        return {"name": name, "ph": "i", "s": scope, **at}

    def _metadata(self, kind: str, thread: int, **args: object) -> Event:
        return {"name": kind, "ph": "M", "pid": self._rank, "tid": thread, "args": args}

    def _nanoseconds(self, seconds: float) -> int:
        return round((self._clock(seconds) - self._zero_seconds) * 1e9)
