"""The records of a rank as rows of items with phases (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.core.agreement.operation import BucketTimes
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.timeline.times import ChannelTimes, OperationTimes, RankRecords

Phase = tuple[str, float, float]


@dataclass(frozen=True)
class Item:
    """An operation, bucket or wait, whose phases follow one another without gaps."""

    subject: str
    phases: Sequence[Phase]
    args: dict[str, object]

    @property
    def start(self) -> float:
        """The start of the first phase."""
        return self.phases[0][1]

    @property
    def end(self) -> float:
        """The end of the last phase."""
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
