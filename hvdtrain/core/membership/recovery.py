"""Going on without ranks that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdtrain.core.membership.followers import Key, Taken
from hvdtrain.core.membership.opening import open_context, start_watches
from hvdtrain.core.membership.world import Context
from hvdtrain.core.timeline.times import RecoveryTimes
from hvdtrain.engines.communicator import EngineWorld, Failures
from hvdtrain.errors import RanksLostError
from hvdtrain.topology import format_ranks

__all__ = ["Recovery", "open_without_lost"]


@dataclass(frozen=True)
class Recovery:
    """A recovery from the loss of ranks, the same on all ranks but for the time.

    Attributes:
        lost: ranks that were lost, as they were numbered before.
        size_before: number of ranks before.
        size: number of ranks that are left.
        seconds: time that this rank took.
    """

    lost: tuple[int, ...]
    size_before: int
    size: int
    seconds: float


def open_without_lost(
    before: Context, failures: Failures, abort: Callable[[int], None]
) -> tuple[Context, Recovery]:
    """Leave a world, and open one of the ranks that are left (collective over them).

    Ranks may end meanwhile. Process sets keep their numbers and lose these ranks, too.

    Args:
        before: world of which ranks have ended.
        failures: its ranks that have ended.
        abort: function that ends all ranks with an exit code, without waiting.
    """
    began, size = time.perf_counter(), before.topology.size
    before.abandon(_error(before.topology.title, failures))
    left = tuple(range(size))
    opened: _Opened | None = None
    while opened is None:
        world = failures.reopen()
        assert world.failures is not None
        assert world.before is not None
        left = tuple(left[rank] for rank in world.before)
        failures = world.failures
        opened = _open(before, world, failures, left, abort)
    here = opened.here
    for number, ranks in before.process_sets.items():
        if not any(rank in left for rank in ranks):
            before.emptied.setdefault(number, list(ranks))
        ranks[:] = _numbered(ranks, left)  # also that of the program's ProcessSet
    here.process_sets, here.emptied = before.process_sets, before.emptied
    here.blocked, here.switch_interval = before.blocked, before.switch_interval
    here.followers, here.shrunk = before.followers, True
    here.followers.catch_up(opened.states)
    here.record(before.recording)
    lost, ended = tuple(rank for rank in range(size) if rank not in left), time.perf_counter()
    if here.recording is not None:
        here.recording.recovered(RecoveryTimes(began, ended, lost, size))
    return here, Recovery(lost, size, len(left), ended - began)


@dataclass(frozen=True)
class _Opened:
    here: Context
    states: Mapping[Key, Taken]  # of followers that are behind on this rank


def _open(
    before: Context,
    world: EngineWorld,
    failures: Failures,
    left: tuple[int, ...],
    abort: Callable[[int], None],
) -> _Opened | None:
    """Return the context of a world, or None if ranks have ended in it (collective)."""
    here: Context | None = None
    states: Mapping[Key, Taken] | None = None
    try:
        here = open_context(before.config, world, before.ordered, before.failed)
        start_watches(here, world.communicator, abort)
        states = before.followers.compare(world.communicator)
        _open_process_sets(here, before, left)
    except Exception as error:
        if not isinstance(world.communicator.explained(error), RanksLostError):
            raise
        failures.revoke()  # others may wait for this rank
        states = None
    if failures.agree(states is not None):
        assert here is not None
        assert states is not None
        return _Opened(here, states)
    if here is None:
        world.communicator.close()
    else:
        here.abandon(_error(here.topology.title, failures))
    return None


def _open_process_sets(here: Context, before: Context, left: tuple[int, ...]) -> None:
    """Open the channels of the process sets that have ranks left (collective)."""
    for number, ranks in sorted(before.process_sets.items()):
        if members := _numbered(ranks, left):
            channel = here.open_channel(members, f"process set {number}")
            if channel is not None:
                here.process_set_channels[number] = channel


def _numbered(ranks: list[int], left: tuple[int, ...]) -> list[int]:
    return [left.index(rank) for rank in ranks if rank in left]


def _error(title: str, failures: Failures) -> RanksLostError:
    ranks = failures.lost()
    who = f"{format_ranks(ranks)} ended" if ranks else "a rank has ended"
    return RanksLostError(f"{title} {who}, and this is no longer the world", ranks)
