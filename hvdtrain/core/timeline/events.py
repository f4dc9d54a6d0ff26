"""Events of one rank in Chrome's trace event format (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hvdtrain.core.agreement.operation import BucketTimes
from hvdtrain.core.agreement.request import Request
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


def rows_of(times: RankRecords) -> Iterator[TraceRow]:
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


class Events:
    """A factory for the events of a rank, a process in the trace whose rows are threads."""

    def __init__(self, times: RankRecords, rank: int) -> None:
        self._clock = root_clock(times.start, times.stop)
        self._zero_seconds = times.zero_seconds
        self._rank = rank

    def process(self, host: str) -> Iterator[Event]:
        """Yield the metadata events that name the process after the rank and its host."""
        yield self._metadata("process_name", 0, name=f"rank {self._rank} ({host})")
        yield self._metadata("process_sort_index", 0, sort_index=self._rank)

    def thread(self, thread: int, label: str, lane: int) -> Iterator[Event]:
        name = label if lane == 1 else f"{label} ({lane})"
        yield self._metadata("thread_name", thread, name=name)
        yield self._metadata("thread_sort_index", thread, sort_index=thread)

    def slices(self, item: Item, thread: int) -> Iterator[Event]:
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

    def round(self, seconds: float, thread: int) -> Event:
        """Return the mark of a round of agreement."""
        return self._instant("round", "t", seconds, thread)

    def note(self, text: str, seconds: float) -> Event:
        """Return a mark for the whole rank."""
        return self._instant(text, "p", seconds, 1)

    def changes(self, times: RankRecords) -> Iterator[Event]:
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
        return {**self.note(text, times.began), "args": {**args, "seconds": seconds}}

    def _instant(self, name: str, scope: str, seconds: float, thread: int) -> Event:
        at = {"ts": self._nanoseconds(seconds) / 1000, "pid": self._rank, "tid": thread}
        return {"name": name, "ph": "i", "s": scope, **at}

    def _metadata(self, kind: str, thread: int, **args: object) -> Event:
        return {"name": kind, "ph": "M", "pid": self._rank, "tid": thread, "args": args}

    def _nanoseconds(self, seconds: float) -> int:
        return round((self._clock(seconds) - self._zero_seconds) * 1e9)


def trace_events(times: RankRecords, rank: int, host: str) -> Iterator[Event]:
    """Yield the events of a rank, which is a process in the trace."""
    events = Events(times, rank)
    yield from events.process(host)
    thread = 0
    for row in rows_of(times):
        for number, lane in enumerate(in_lanes(row.items), 1):
            thread += 1
            yield from events.thread(thread, row.label, number)
            if number == 1:
                for moment in row.marks:
                    yield events.round(moment, thread)
            for item in lane:
                yield from events.slices(item, thread)
    yield from events.changes(times)
    if times.dropped:
        text = f"{times.dropped} records dropped: record a shorter time"
        yield events.note(text, times.stop.at_seconds)


def in_lanes(items: Iterable[Item]) -> list[list[Item]]:
    """Distribute items over the smallest number of lanes, at least one, without overlaps."""
    lanes: list[list[Item]] = [[]]
    free = [0]  # heaps: the first free lane is taken
    busy: list[tuple[float, int]] = []
    for item in sorted(items, key=lambda item: item.start):
        while busy and busy[0][0] <= item.start:
            heappush(free, heappop(busy)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        number = heappop(free)
        lanes[number].append(item)
        heappush(busy, (item.end, number))
    return lanes
