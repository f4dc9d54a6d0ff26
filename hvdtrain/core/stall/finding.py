"""Detection of stalled operations from the pending operations of all ranks (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.core.agreement.request import JOIN, LEAVE
from hvdtrain.topology import format_ranks

# Members of the channel, number of the channel among those with these members, and request key.
OperationId = tuple[tuple[int, ...], int, str]

_MARKERS = (JOIN.key, LEAVE.key)


@dataclass(frozen=True)
class StallSettings:
    """Settings of the stall watch, the same on all ranks."""

    period_seconds: float
    shutdown_seconds: float
    stacks: bool

    def periods(self, seconds: float) -> int:
        """Return how many reports are due for a wait of this length."""
        return int(seconds // self.period_seconds) + (seconds >= self.shutdown_seconds)


@dataclass(frozen=True)
class Wait:
    """An operation that is pending on one rank.

    Attributes:
        seconds: time for which it has waited for other ranks; None while it waits for this one.
    """

    id: OperationId
    subject: str
    seconds: float | None


@dataclass(frozen=True)
class Stall:
    """A stalled operation.

    Attributes:
        seconds: time for which it has waited.
    """

    id: OperationId
    subject: str
    seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    unknown: str = ""

    @property
    def is_marker(self) -> bool:
        """Whether this is a request to join or to leave."""
        return self.id[2] in _MARKERS


def find_stalls(waits: Sequence[Sequence[Wait]], period_seconds: float) -> list[Stall]:
    """Return the stalled operations, the oldest first.

    The age of an operation is that on the rank which waits longest if ranks are missing, and on the
    rank that came last otherwise. Requests to join or to leave are reported only if nothing else is
    stalled, because ranks that are blocked elsewhere delay them.
    """
    by_id: dict[OperationId, dict[int, Wait]] = {}
    for rank, own in enumerate(waits):
        for wait in own:
            by_id.setdefault(wait.id, {})[rank] = wait
    stalls = [stall for id in by_id if (stall := _stall(id, by_id)) is not None]
    return _choose(stalls, period_seconds, size=len(waits))


def stalls_of_one(
    rank: int, size: int, waits: Sequence[Wait], period_seconds: float, unknown: str
) -> list[Stall]:
    """Return the stalls that one rank knows of by itself; see `find_stalls`."""
    stalls = [
        Stall(wait.id, wait.subject, wait.seconds, waiting=(rank,), unknown=unknown)
        for wait in waits
        if wait.seconds is not None
    ]
    return _choose(stalls, period_seconds, size)


def _choose(stalls: Sequence[Stall], period_seconds: float, size: int) -> list[Stall]:
    old = [stall for stall in stalls if stall.seconds >= period_seconds]
    # The same request is submitted on every channel; only the world's is reported.
    world = (tuple(range(size)), 0)
    markers = [stall for stall in old if stall.is_marker and stall.id[:2] == world]
    ordinary = [stall for stall in old if not stall.is_marker]
    return sorted(ordinary or markers, key=lambda stall: -stall.seconds)


def _stall(id: OperationId, by_id: dict[OperationId, dict[int, Wait]]) -> Stall | None:
    members, number, _ = id
    holders = by_id[id]
    seconds = {rank: w.seconds for rank, w in holders.items() if w.seconds is not None}
    if not seconds:
        return None
    absent = [rank for rank in members if rank not in holders]
    left = [rank for rank in absent if rank in by_id.get((members, number, LEAVE.key), {})]
    joined = [rank for rank in absent if rank in by_id.get((members, number, JOIN.key), {})]
    joined = [rank for rank in joined if rank not in left]
    missing = [rank for rank in absent if rank not in (*joined, *left)]
    partial = [rank for rank in holders if rank not in seconds]
    age = max if missing or partial or left else min
    return Stall(
        id=id,
        subject=next(iter(holders.values())).subject,
        seconds=age(seconds.values()),
        waiting=tuple(sorted(seconds)),
        missing=tuple(missing),
        partial=tuple(sorted(partial)),
        joined=tuple(joined),
        left=tuple(left),
    )


def describe(stall: Stall) -> str:
    """Return one line that says which ranks wait for which."""
    wait = "wait" if len(stall.waiting) > 1 else "waits"
    text = f"{stall.subject} for {stall.seconds:.0f} s: {format_ranks(stall.waiting)} {wait}"
    if stall.unknown:
        return f"{text}, and {stall.unknown}"
    late = sorted((*stall.missing, *stall.partial))
    if late:
        text += f" for {format_ranks(late)}"
    elif not stall.left:
        text += ", and nobody is missing: the engine does not get on, or has much to move"
    if stall.partial:
        text += f"; {format_ranks(stall.partial)} submitted a part of it"
    if stall.joined:
        text += f"; {format_ranks(stall.joined)} joined"
    if stall.left:
        text += f"; {format_ranks(stall.left)} left"
    return text
