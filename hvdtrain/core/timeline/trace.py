"""Formats what a rank has recorded as events of Chrome's trace event format. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from hvdtrain.core.request import Request
from hvdtrain.core.timeline.clock import root_clock
from hvdtrain.core.timeline.times import BucketTimes, ChannelTimes, OperationTimes, RankTimes

__all__ = ["bucket_phases", "in_lanes", "operation_phases", "trace_events"]

Event = dict[str, Any]
Phase = tuple[str, float, float]


@dataclass(frozen=True)
class _Item:
    """Phases that follow one another without a gap."""

    subject: str
    phases: Sequence[Phase]
    args: Event

    @property
    def start(self) -> float:
        return self.phases[0][1]

    @property
    def end(self) -> float:
        return self.phases[-1][2]


@dataclass(frozen=True)
class _Row:
    label: str
    items: Iterable[_Item]
    marks: Sequence[float] = ()


def trace_events(times: RankTimes, rank: int, host: str) -> Iterator[Event]:
    """Yield the events of one rank, its process.

    Args:
        times: what it has recorded.
        rank: its number.
        host: where it runs.
    """
    at = _nanoseconds(root_clock(times.start, times.stop), times.zero_seconds)
    yield _metadata("process_name", rank, 0, name=f"rank {rank} ({host})")
    yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    thread = 0
    for row in _rows(times):
        for number, lane in enumerate(in_lanes(row.items), 1):
            thread += 1
            label = row.label if number == 1 else f"{row.label} ({number})"
            yield _metadata("thread_name", rank, thread, name=label)
            yield _metadata("thread_sort_index", rank, thread, sort_index=thread)
            marks = row.marks if number == 1 else ()
            for moment in marks:
                yield _instant("round", "t", at(moment), rank, thread)
            for item in lane:
                yield from _slices(item, at, rank, thread)
    if times.dropped:
        text = f"{times.dropped} records dropped: record a shorter time"
        yield _instant(text, "p", at(times.stop.at_seconds), rank, 1)


def operation_phases(times: OperationTimes) -> list[Phase]:
    """Return the phases of an operation; one that got no further has no later ones."""
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
    """Return the phases of a bucket: the channel waits for it, or it for the channel."""
    waiting = [("waiting", times.free, times.filled)] if times.filled > times.free else []
    queue, moving = ("queue", times.filled, times.began), ("moving", times.began, times.ended)
    return [*waiting, queue, moving]


def in_lanes(items: Iterable[_Item]) -> list[list[_Item]]:
    """Spread items over as few lanes as hold them without an overlap; there is at least one."""
    lanes: list[list[_Item]] = [[]]
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


def _rows(times: RankTimes) -> Iterator[_Row]:
    blocked = (_Item("", [("blocked", *interval)], {}) for interval in times.blocked.kept)
    yield _Row("training thread", blocked)
    for channel in times.channels:
        operations = (_operation(o, channel) for o in channel.operations.kept)
        yield _Row(channel.label, operations, channel.rounds.kept)
        if channel.buckets.kept:
            buckets = (_bucket(b, channel) for b in channel.buckets.kept)
            yield _Row(f"{channel.label}: buckets", buckets)


def _operation(times: OperationTimes, channel: ChannelTimes) -> _Item:
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
    return _Item(subject, operation_phases(times), said)


def _bucket(times: BucketTimes, channel: ChannelTimes) -> _Item:
    name = f"bucket {times.number}"
    args = {"name": name, "bytes": times.nbytes, "process set": channel.process_set}
    return _Item(name, bucket_phases(times), args)


def _slices(item: _Item, at: Callable[[float], int], rank: int, thread: int) -> Iterator[Event]:
    for phase, start, end in item.phases:
        yield {
            "name": f"{phase} {item.subject}".rstrip(),
            "cat": phase,
            "ph": "X",
            "ts": at(start) / 1000,
            "dur": (at(end) - at(start)) / 1000,
            "pid": rank,
            "tid": thread,
            "args": item.args,
        }


def _instant(name: str, scope: str, moment: int, rank: int, thread: int) -> Event:
    return {"name": name, "ph": "i", "s": scope, "ts": moment / 1000, "pid": rank, "tid": thread}


def _metadata(kind: str, rank: int, thread: int, **args: object) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}


def _nanoseconds(clock: Callable[[float], float], zero: float) -> Callable[[float], int]:
    return lambda seconds: round((clock(seconds) - zero) * 1e9)
