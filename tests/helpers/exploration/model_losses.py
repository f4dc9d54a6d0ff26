"""A process of a model in which the ranks that are left go on, and how far it has got. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from model_program import (
    RankModel,
    Transition,
    Words,
    compare_ends,
    is_call,
    is_stalled,
    late_names,
    outcomes_of,
)
from model_rank import DONE, FAILED, REFUSED, Call, Fault, Heard, Ran, Rank, names_of, progress_of

from hvdtrain.core.agreement.decision import (
    ChannelState,
    Failed,
    ReportsExchanged,
    Voted,
)
from hvdtrain.core.agreement.lifecycle import transition
from hvdtrain.core.agreement.request import Request


class Stage(Enum):
    """What a process does.

    RUNNING its program; ABANDONING its channel, whose driver may be in an engine call; WAITING for
    all ranks that are left; OPENING the next world; OVER in order; DEAD.
    """

    RUNNING = auto()
    ABANDONING = auto()
    WAITING = auto()
    OPENING = auto()
    OVER = auto()
    DEAD = auto()


class Process(NamedTuple):
    stage: Stage
    group: tuple[int, ...]
    rank: Rank
    world: int = 0
    part: int = 0
    broken: bool = False


class Processes(NamedTuple):
    all: tuple[Process, ...]
    deaths_left: int


def is_left(process: Process) -> bool:
    return process.stage not in (Stage.OVER, Stage.DEAD)


def end(process: Process, stage: Stage) -> Process:
    """Return a process that has ended, of which nothing is left but how operations ended."""
    rank = Rank(ended=process.rank.ended if stage is Stage.OVER else ())
    return Process(stage, process.group, rank, process.world)


def call_of(process: Process) -> Call | None:
    head = process.rank.actions[0] if process.rank.actions else None
    if isinstance(head, Request):
        progress = progress_of(process.rank, head)
        # Otherwise it waits for the program to fill a bucket.
        return head if progress is None or progress.ready else None
    return head if is_call(head) else None


def has_outcome(process: Process) -> bool:
    """Return whether the engine call is done, and the driver has not gone on yet."""
    actions = process.rank.actions
    return bool(actions) and isinstance(actions[0], Voted | ReportsExchanged | Ran | Heard)


def is_told(before: Rank, after: Rank) -> bool:
    """Return whether a program is told by its last word that ranks are lost."""
    news = dict(set(after.ended) - set(before.ended))
    refused = [name for name, how in news.items() if how == REFUSED]
    if not (refused or after.over):
        return False
    if not after.life.lost:
        raise Fault(f"{refused or sorted(after.ended)}: an error does not say that ranks are lost")
    if not refused and FAILED not in dict(after.ended).values():
        raise Fault(f"the program ends with {sorted(after.ended)}")
    return True


def put(state: Processes, number: int, process: Process) -> Processes:
    return state._replace(all=(*state.all[:number], process, *state.all[number + 1 :]))


def break_world(state: Processes, of: Process) -> Processes:
    """Have the calls fail that are made in the world of a process."""
    return state._replace(
        all=tuple(
            other._replace(broken=True) if is_left(other) and other.world == of.world else other
            for other in state.all
        )
    )


_LOSS = Failed("a rank has ended", lost=True)
_IN_WORLD = (Stage.RUNNING, Stage.ABANDONING)


class LossModel:
    def __init__(
        self, *programs: str, deaths: int = 1, threads: bool = True, rules: Transition = transition
    ) -> None:
        self._programs = [[part.split() for part in program.split("|")] for program in programs]
        self._deaths, self._one = deaths, RankModel(threads, rules)
        self._late = late_names(part for parts in self._programs for part in parts)

    def first(self) -> Processes:
        group = tuple(range(len(self._programs)))
        rank = Rank(life=ChannelState(len(group)))
        return Processes(tuple(Process(Stage.RUNNING, group, rank) for _ in group), self._deaths)

    def is_end(self, state: Processes) -> bool:
        if any(map(is_left, state.all)):
            return not state.deaths_left and self._is_stalled(state)
        for world in {process.world for process in state.all}:
            members = [process for process in state.all if process.world == world]
            if all(process.stage is Stage.OVER for process in members):
                compare_ends([process.rank for process in members], self._late)
        return True

    def _is_stalled(self, state: Processes) -> bool:
        left = [number for number, process in enumerate(state.all) if is_left(process)]
        running = [state.all[number] for number in left]
        if any(process.stage is not Stage.RUNNING or process.broken for process in running):
            return False
        words = [self._words(number, state.all[number]) for number in left]
        return is_stalled(words, [process.rank for process in running])

    def moves(self, state: Processes) -> Iterator[tuple[str, Processes]]:
        for number, process in enumerate(state.all):
            for move, after in self._own(state, number, process):
                changed = put(state, number, after)
                broke = after.broken and not process.broken
                yield f"{number}: {move}", break_world(changed, process) if broke else changed
            if state.deaths_left and is_left(process):
                dead = put(state, number, end(process, Stage.DEAD))
                lost = dead._replace(deaths_left=state.deaths_left - 1)
                yield f"{number}: dies", break_world(lost, process)
        yield from self._meetings(state)
        yield from self._changes(state)

    # What a process does by itself.

    def _words(self, number: int, process: Process) -> Words:
        return self._programs[number][process.part]

    def _own(
        self, state: Processes, number: int, process: Process
    ) -> Iterator[tuple[str, Process]]:
        words = self._words(number, process)
        if process.stage is Stage.RUNNING:
            yield from self._program(state, number, process)
        elif process.stage is Stage.ABANDONING and self._is_at_rest(process):
            yield "closes", self._close(words, process)
        if process.stage not in _IN_WORLD:
            return
        if has_outcome(process):
            yield "goes on", process._replace(rank=self._one.take(process.rank))
        elif call_of(process) is None:
            for move, rank in self._one.driver(words, process.rank):
                yield move, process._replace(rank=rank)
        if process.broken and (has_outcome(process) or call_of(process) is not None):
            yield "call fails", self._fail(words, process)

    def _program(
        self, state: Processes, number: int, process: Process
    ) -> Iterator[tuple[str, Process]]:
        words = self._words(number, process)
        word = words[process.rank.place] if process.rank.place < len(words) else ""
        if word == "recover":
            yield word, self._abandon(process)
            return
        if word == "close" and not self._all_are_through(state, process):
            return
        for move, rank in self._one.program(words, process.rank):
            if not word:
                yield move, end(process, Stage.OVER)._replace(broken=True)
            elif is_told(process.rank, rank):
                yield f"{move} tells", self._abandon(process._replace(rank=rank))
            else:
                yield move, process._replace(rank=rank)

    def _all_are_through(self, state: Processes, process: Process) -> bool:
        """Return whether all members that are left have left, or go on without this one."""
        others = [state.all[number] for number in process.group if is_left(state.all[number])]
        return all(
            dict(other.rank.ended).get("leave") == DONE or other.stage is Stage.WAITING
            for other in others
            if other.world == process.world
        )

    def _fail(self, words: Words, process: Process) -> Process:
        """Have an engine call fail, as Driving does."""
        if process.stage is Stage.ABANDONING:  # what is pending fails when the driver is at rest
            return process._replace(rank=process.rank._replace(actions=()))
        failed = self._one.fail(words, process.rank, _LOSS)
        self._one.see_that_it_tells(failed)
        return process._replace(rank=failed)

    def _abandon(self, process: Process) -> Process:
        if dict(process.rank.ended).get("leave") == DONE:
            raise Fault("a program that has left in order is told of a loss")
        rank = self._one.abandon(process.rank, _LOSS)._replace(over=False)
        self._one.see_that_it_tells(rank)
        return process._replace(stage=Stage.ABANDONING, rank=rank, broken=True)

    def _is_at_rest(self, process: Process) -> bool:
        return not process.rank.actions

    def _close(self, words: Words, process: Process) -> Process:
        rank = self._end_pending(process.rank)
        if rank.pending:
            raise Fault(f"{names_of(rank.pending)} outlives a channel that was abandoned")
        if rank.actions or list(self._one.driver(words, rank)):
            raise Fault("a driver goes on in a channel that was abandoned")
        self._one.see_that_it_tells(rank)
        return process._replace(stage=Stage.WAITING, rank=rank._replace(ended=(), told=()))

    def _end_pending(self, rank: Rank) -> Rank:
        return self._one.end_pending(rank)

    # Where members meet.

    def _meetings(self, state: Processes) -> Iterator[tuple[str, Processes]]:
        calls = {
            number: call
            for number, process in enumerate(state.all)
            if process.stage in _IN_WORLD and (call := call_of(process)) is not None
        }
        if any(state.all[number].rank.freed for number in calls):
            raise Fault("an engine call after the communicator was given back")
        worlds = {state.all[number].world for number in calls}
        if len(worlds) > 1:
            raise Fault(f"ranks call the engine in different worlds: {calls}")
        if not calls:
            return
        process = state.all[min(calls)]
        ranks = [state.all[number].rank for number in process.group]
        outcomes = outcomes_of(ranks, list(calls.values()), range(len(ranks)))
        if outcomes is None or process.broken:
            return
        for number, rank, outcome in zip(process.group, ranks, outcomes, strict=True):
            done = rank._replace(actions=(outcome, *rank.actions[1:]))
            # While nothing can go wrong, it does not matter who goes on first.
            done = done if self._canbreak_world(state) else self._one.take(done)
            state = put(state, number, state.all[number]._replace(rank=done))
        yield type(outcomes[0]).__name__, state

    def _canbreak_world(self, state: Processes) -> bool:
        return state.deaths_left > 0 or any(
            "recover" in self._words(number, process) for number, process in enumerate(state.all)
        )

    # The next world.

    def _changes(self, state: Processes) -> Iterator[tuple[str, Processes]]:
        for world in {process.world for process in state.all}:
            members = [n for n, process in enumerate(state.all) if process.world == world]
            going = self._goes_on(state, members)
            if going:
                yield "the world shrinks", self._shrink(state, going)
            opening = [n for n in members if is_left(state.all[n])]
            if opening and all(state.all[n].stage is Stage.OPENING for n in opening):
                yield "the world opens", self._open(state, opening)

    def _goes_on(self, state: Processes, members: Sequence[int]) -> Sequence[int]:
        """Return the members that go on together in the next world now, or none."""
        left = [number for number in members if is_left(state.all[number])]
        ready = all(state.all[number].stage is Stage.WAITING for number in left)
        return left if ready else ()

    def _shrink(self, state: Processes, going: Sequence[int]) -> Processes:
        for number in going:
            before = state.all[number]
            rank = Rank(life=self._next_life(before.rank.life, len(going)))
            after = Process(Stage.OPENING, tuple(going), rank, before.world + 1, before.part)
            state = put(state, number, after)
        return state

    def _next_life(self, life: ChannelState, size: int) -> ChannelState:
        return ChannelState(size)

    def _open(self, state: Processes, members: Sequence[int]) -> Processes:
        """Begin in a new world, or go on to the next one if a member has ended meanwhile."""
        for number in members:
            process = state.all[number]
            if process.broken:
                after = process._replace(stage=Stage.WAITING)
            else:
                self._see_that_it_is_new(state, process)
                part = min(process.part + 1, len(self._programs[number]) - 1)
                after = process._replace(stage=Stage.RUNNING, part=part)
            state = put(state, number, after)
        return state

    def _see_that_it_is_new(self, state: Processes, process: Process) -> None:
        if process.rank.life != ChannelState(len(process.group)):
            raise Fault(f"a new channel begins as {process.rank.life}")
        for number, other in enumerate(state.all):
            if is_left(other) and (number not in process.group or other.group != process.group):
                raise Fault(f"{process.group} go on without {number}, which is left")


def _waiting(state: Processes, members: Sequence[int]) -> list[int]:
    return [number for number in members if state.all[number].stage is Stage.WAITING]


def _fills_nothing(self: LossModel, process: Process) -> Process:
    after = ABANDON(self, process)
    return after._replace(rank=after.rank._replace(steps=process.rank.steps))


def _leaves_with_all_only(self: LossModel, state: Processes, process: Process) -> bool:
    members = [state.all[number] for number in process.group]
    return all(
        member.stage is Stage.OVER or dict(member.rank.ended).get("leave") == DONE
        for member in members
    )


def _tells_who_has_left(
    self: LossModel, state: Processes, number: int, process: Process
) -> Iterator[tuple[str, Process]]:
    if process.broken and dict(process.rank.ended).get("leave") == DONE:
        yield "is told", self._abandon(process)
    yield from PROGRAM(self, state, number, process)


ABANDON, PROGRAM = LossModel._abandon, LossModel._program
# What processes may do wrong: the method, and what it does instead.
WRONG_MODELS: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "keeps what is pending": {"_end_pending": lambda self, rank: rank},
    "leaves its driver in a call": {"_is_at_rest": lambda self, process: True},
    "fills nothing for which the driver waits": {"_abandon": _fills_nothing},
    "leaves others in calls": {
        "_abandon": lambda self, process: ABANDON(self, process)._replace(broken=process.broken)
    },
    "takes over the channel": {"_next_life": lambda self, life, size: replace(life, size=size)},
    "takes over who is behind": {
        "_next_life": lambda self, life, size: ChannelState(size, behind=life.behind)
    },
    "keeps its size": {"_next_life": lambda self, life, size: ChannelState(life.size)},
    "waits for the dead": {
        "_goes_on": lambda self, state, members: (
            members if _waiting(state, members) == list(members) else ()
        )
    },
    "waits for nobody": {"_goes_on": lambda self, state, members: _waiting(state, members)},
    "waits for nobody, seen by calls in two worlds": {
        "_goes_on": lambda self, state, members: _waiting(state, members),
        "_see_that_it_is_new": lambda self, state, process: None,
    },
    "leaves with all only": {"_all_are_through": _leaves_with_all_only},
    "tells who has left": {"_program": _tells_who_has_left},
}
