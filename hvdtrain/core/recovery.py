"""Going on in the next world: without ranks that have ended, and with one that has joined."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.membership import (
    Context,
    Followers,
    Key,
    Taken,
    open_context,
    start_watches,
)
from hvdtrain.core.recruiter import Recruiter
from hvdtrain.core.timeline.records import read_clock
from hvdtrain.core.timeline.start_stop import Recording
from hvdtrain.engines.communicator import JOINED, Communicator, EngineWorld, Failures
from hvdtrain.errors import HvdtrainError, RanksLostError
from hvdtrain.topology import format_ranks


@dataclass(frozen=True)
class Recovery:
    """A change of the world, the same on all ranks that were there before but for the times."""

    lost: tuple[int, ...]
    size_before: int
    size: int
    seconds: float
    joined: tuple[int, ...] = ()
    start_seconds: float = 0.0

    @property
    def left(self) -> int:
        """The number of ranks that were there before and are now."""
        return self.size - len(self.joined)


@dataclass(frozen=True)
class _Told:
    """What a rank that joins is told by the others."""

    members: tuple[int, ...]
    process_sets: Mapping[int, list[int]]
    emptied: Mapping[int, list[int]]
    vacancies: tuple[str, ...]
    worlds: int
    recording: tuple[str, bool, float] | None


@collective
def open_next(
    before: Context,
    failures: Failures,
    abort: Callable[[Communicator, int], None],
    leaving: Collection[int] = (),
) -> tuple[Context, Recovery]:
    """Leave a world, and open the next one (collective over the ranks that are left).

    Ranks may end meanwhile. Process sets keep their numbers and lose these ranks, too. A process
    that is ready to join becomes the last rank.
    """
    began, size = time.perf_counter(), before.topology.size
    taken = None if before.recruiter is None else before.recruiter.take()
    newcomer = None if taken is None else taken.newcomer
    before.abandon(_error(before.topology.title, failures))
    members = tuple(range(size))
    opened: _Opened | None = None
    while opened is None:
        world, newcomer = failures.reopen(newcomer), None
        assert world.failures is not None
        assert world.before is not None
        members = tuple(JOINED if rank == JOINED else members[rank] for rank in world.before)
        failures = world.failures
        telling = _tell(before, members, world.hostnames, leaving)
        opened = _open(
            before.config, world, before.ordered, before.failed, abort, before.followers, telling
        )
    here = opened.here
    _hand_over(before, here, members)
    here.vacancies = opened.told.vacancies
    here.followers.catch_up(opened.states)
    lost, ended = tuple(sorted({*range(size)}.difference(members))), time.perf_counter()
    joined = tuple(rank for rank, number in enumerate(members) if number == JOINED)
    if here.recording is not None:
        here.recording.times.note_lost(began, ended, lost, size)
        here.recording.times.note_joined(began, ended, joined, len(members))
    recruit(here)
    start_seconds = 0.0 if taken is None else taken.ready_after or 0.0
    return here, Recovery(lost, size, len(members), ended - began, joined, start_seconds)


def _hand_over(before: Context, here: Context, members: Sequence[int]) -> None:
    """Have the process sets and more continue."""
    for number, ranks in before.process_sets.items():
        if not any(rank in members for rank in ranks):
            before.emptied.setdefault(number, list(ranks))
        ranks[:] = _numbered(ranks, members)  # also that of the program's ProcessSet
    here.process_sets, here.emptied = before.process_sets, before.emptied
    for channel in here.channels():
        channel.blocked = before.blocked
    here.switch_interval, here.recruiter = before.switch_interval, before.recruiter
    here.accepts, here.changed = before.accepts, True
    here.record(before.recording)


@collective
def open_of_newcomer(
    config: Config,
    world: EngineWorld,
    ordered: bool,
    failed: Callable[[str], None],
    abort: Callable[[Communicator, int], None],
) -> Context:
    """Open a world that this rank has joined (collective, with `open_next` of the others)."""
    followers = Followers()
    while (opened := _open(config, world, ordered, failed, abort, followers, None)) is None:
        assert world.failures is not None
        world = world.failures.reopen()
    here, told = opened.here, opened.told
    here.process_sets.update(told.process_sets)
    here.emptied.update(told.emptied)
    here.vacancies, here.newcomer, here.changed = told.vacancies, True, True
    here.followers.catch_up(opened.states)
    here.record(opened.recording)
    return here


def recruit(here: Context) -> None:
    """Have rank 0 start other ranks, if they are asked for and the program accepts them."""
    config, failures = here.config, here.failures
    if here.topology.rank or failures is None or not config.max_ranks or not here.accepts:
        return
    if here.recruiter is None:
        here.recruiter = Recruiter(failures.start_rank, config.max_ranks, config.host_discovery)
    here.recruiter.follow(here.topology.hostnames, here.vacancies)


@dataclass(frozen=True)
class _Opened:
    here: Context
    told: _Told
    states: Mapping[Key, Taken]  # of followers that are behind on this rank
    recording: Recording | None  # of a rank that has joined


@collective
def _open(
    config: Config,
    world: EngineWorld,
    ordered: bool,
    failed: Callable[[str], None],
    abort: Callable[[Communicator, int], None],
    followers: Followers,
    telling: _Told | None,
) -> _Opened | None:
    """Return the context of a world, or None if ranks have ended in it."""
    failures = world.failures
    assert failures is not None
    here: Context | None = None
    opened: _Opened | None = None
    try:
        here = open_context(config, world, ordered, failed)
        here.followers = followers
        start_watches(here, world.communicator, partial(abort, world.communicator))
        # The first rank has not joined unless all have, and the others would tell the same.
        first = telling if world.communicator.rank == 0 else None
        told = next(filter(None, world.communicator.gather_objects(first)), None)
        if told is None:
            raise HvdtrainError(
                "all ranks ended whose training was to be joined: start the job again"
            )
        recording = _join_recording(telling is None, told, world.communicator)
        followers.world = told.worlds
        states = followers.compare(world.communicator)
        for number, members in sorted(told.process_sets.items()):
            if members:
                channel = here.open_channel(members, f"process set {number}")
                if channel is not None:
                    here.process_set_channels[number] = channel
        opened = _Opened(here, told, states, recording)
    except Exception as error:
        if not isinstance(world.communicator.explained(error), RanksLostError):
            raise
        failures.revoke()  # others may wait for this rank
    if failures.agree(opened is not None):
        assert opened is not None
        return opened
    if here is None:
        world.communicator.close()
    else:
        here.abandon(_error(here.topology.title, failures))
    return None


def _tell(
    before: Context, members: tuple[int, ...], hosts: Sequence[str], leaving: Collection[int]
) -> _Told:
    lost = sorted({*range(before.topology.size)}.difference(members, leaving))
    vacancies = [*before.vacancies, *(before.topology.hostnames[rank] for rank in lost)]
    for rank, number in enumerate(members):
        if number == JOINED and hosts[rank] in vacancies:
            vacancies.remove(hosts[rank])
    numbered = {key: _numbered(ranks, members) for key, ranks in before.process_sets.items()}
    emptied = {key: before.emptied.get(key, before.process_sets[key]) for key in numbered}
    recording = before.recording
    return _Told(
        members,
        numbered,
        {key: list(ranks) for key, ranks in emptied.items() if not numbered[key]},
        tuple(vacancies),
        before.followers.world,
        None
        if recording is None
        else (recording.path, recording.marks_rounds, recording.times.zero_seconds),
    )


@collective
def _join_recording(joins: bool, told: _Told, communicator: Communicator) -> Recording | None:
    """Start the recording of a rank that joins, if there is one (collective if any rank joins)."""
    if told.recording is None or JOINED not in told.members:
        return None
    reading = read_clock(communicator)
    if not joins:
        return None
    path, marks_rounds, zero = told.recording
    return Recording(path, marks_rounds, reading, zero)


def _numbered(ranks: Sequence[int], members: Sequence[int]) -> list[int]:
    numbers = {rank: number for number, rank in enumerate(members)}
    return [numbers[rank] for rank in ranks if rank in numbers]


def _error(title: str, failures: Failures) -> RanksLostError:
    ranks = failures.lost()
    who = f"{format_ranks(ranks)} ended" if ranks else "a rank has ended"
    return RanksLostError(f"{title} {who}, and this is no longer the world", ranks)
