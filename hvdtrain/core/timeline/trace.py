"""Conversion of a rank's records to Chrome's trace event format (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from hvdtrain.core.timeline.events import Event, Events
from hvdtrain.core.timeline.items import Item, rows_of
from hvdtrain.core.timeline.times import RankRecords


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
