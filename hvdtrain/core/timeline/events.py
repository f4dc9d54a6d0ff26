"""Events of one rank in Chrome's trace event format (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.core.timeline.clock import root_clock
from hvdtrain.core.timeline.items import Item
from hvdtrain.core.timeline.times import JoinTimes, RankRecords, RecoveryTimes
from hvdtrain.topology import format_ranks

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
        """Yield the metadata events that name a row."""
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
        """Return the mark of a round of agreement.

        Args:
            seconds: start of the round, on this rank's clock.
        """
        return self._instant("round", "t", seconds, thread)

    def note(self, text: str, seconds: float) -> Event:
        """Return a mark for the whole rank.

        Args:
            seconds: time of the mark, on this rank's clock.
        """
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
