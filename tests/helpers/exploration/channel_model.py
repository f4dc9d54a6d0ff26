"""A model of channels on all ranks, and what visits every state that it can reach.

The rules are those of production: `transition`, with `decide` inside it, and `unanimous`. What is
modelled is around them: programs that submit and wait, threads that take their turns in any order,
and primitives that end when all members have entered the same one.

model_rank.py has the words of programs. Where ranks have several channels, of which each has its
own driver, the letter of a channel stands before each word: "As( As+ As^". At the end of a backward
pass, a rank takes part in the rounds of its other channels meanwhile. `sets` has the members of
channels that not all ranks have.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from model_rank import (
    DESERTED,
    Fault,
    Rank,
    RankModel,
    Transition,
    compare_ends,
    end_pass,
    is_call,
    is_stalled,
    late_names,
    names_of,
)

from hvdtrain.core.agreement.lifecycle import ChannelState, Failed, transition
from hvdtrain.core.gradients import reducer

_OF_ANOTHER = "another channel's"

# What there is on a rank, in each channel; its program is at the same word in all.
Own = tuple[Rank, ...]


class World(NamedTuple):
    """All ranks, and whether something has happened that ends the job."""

    ranks: tuple[Own, ...]
    job_ends: bool = False


class ChannelModel:
    def __init__(
        self,
        *programs: str,
        channels: str = "",
        sets: Mapping[str, Sequence[int]] = {},
        threads: bool = True,
        failing: int | None = None,
        deserts: bool = False,
        rules: Transition = transition,
    ) -> None:
        words, self._letters = [program.split() for program in programs], tuple(channels) or ("",)
        self._of = [
            [[w[len(c) :] if w.startswith(c) else _OF_ANOTHER for w in own] for c in self._letters]
            for own in words
        ]
        self._alone = len(self._letters) == 1
        everyone = range(len(words))
        self._members = [sets.get(letter, everyone) for letter in self._letters]
        self._failing, self._deserts = failing, deserts
        self._one, self._late = RankModel(threads, rules), late_names(words)

    def first(self) -> World:
        rank = Rank(life=ChannelState(len(self._of)))
        return World(((rank,) * len(self._letters),) * len(self._of))

    def is_end(self, world: World) -> bool:
        if not all(own[0].over for own in world.ranks):
            first = [own[0] for own in world.ranks]
            stalls = self._alone and not world.job_ends
            return stalls and is_stalled([of[0] for of in self._of], first)
        if not world.job_ends:
            for number, own in enumerate(world.ranks):
                if left := [names_of(rank.pending) for rank in own if rank.pending]:
                    raise Fault(f"rank {number} ends with {', '.join(left)} pending")
            for ranks in zip(*world.ranks, strict=True):
                compare_ends(ranks, {"leave", *self._late})
        return True

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        if world.job_ends:
            # An abort ends every process, whatever it does.
            over = tuple(tuple(r._replace(over=True) for r in own) for own in world.ranks)
            yield "abort", world._replace(ranks=over)
            return
        for number, own in enumerate(world.ranks):
            # Programs of several channels leave none of them: others may wait for their drivers.
            if own[0].over and self._alone:
                continue
            for move, changed in self._program(number, own):
                yield f"{number}: {move}", self._put(world, number, changed)
            for channel, rank in enumerate(own):
                if number not in self._members[channel]:
                    continue
                words, letter = self._of[number][channel], self._letters[channel]
                for move, after in self._one.driver(words, rank):
                    changed = (*own[:channel], after, *own[channel + 1 :])
                    yield f"{number}: {letter} {move}", self._put(world, number, changed)
                # In an engine call, or where it waits in one for its program.
                if number == self._failing and rank.actions and is_call(rank.actions[0]):
                    failed = self._one.fail(words, rank, Failed("the engine", lost=True))
                    self._one.see_that_it_tells(failed)
                    after_it = self._put(world, number, (failed,))
                    yield f"{number}: engine fails", after_it._replace(job_ends=True)
        for channel, letter in enumerate(self._letters):
            members = self._members[channel]
            together = [world.ranks[number][channel] for number in members]
            for move, ranks in self._one.meet(together, members):
                met = world
                for number, rank in zip(members, ranks, strict=True):
                    own = met.ranks[number]
                    met = self._put(met, number, (*own[:channel], rank, *own[channel + 1 :]))
                yield f"{letter} {move}", met

    def _program(self, number: int, own: Own) -> Iterator[tuple[str, Own]]:
        place = own[0].place
        if own[0].over:
            return
        channel, words = next(
            (channel, words)
            for channel, words in enumerate(self._of[number])
            if place == len(words) or words[place] != _OF_ANOTHER
        )
        rank = own[channel]._replace(called=any(rank.called for rank in own))
        for move, after in self._one.program(words, rank):
            ends = after.at_end and not rank.at_end
            others = [
                (end_pass(other) if ends else other)._replace(
                    place=after.place,
                    listening=self._concerned(channel, heard) if after.at_end else (),
                    called=after.called,
                    over=after.over,
                )
                for heard, other in enumerate(own)
            ]
            yield (
                f"{self._letters[channel]} {move}",
                (*others[:channel], after, *others[channel + 1 :]),
            )

    def _concerned(self, channel: int, heard: int) -> tuple[int, ...]:
        """Return what `Reducer._concerned` returns in one channel of a step of another one."""
        others = [ranks for other, ranks in enumerate(self._members) if other != heard]
        return tuple(sorted(reducer.linked(self._members[channel], others)))

    def _put(self, world: World, number: int, own: Own) -> World:
        ranks = (*world.ranks[:number], own, *world.ranks[number + 1 :])
        deserted = any(end == DESERTED for rank in own for _, end in rank.ended)
        if deserted and not self._deserts:
            raise Fault(f"rank {number} is told of a rank that left, and nobody waits in vain")
        return World(ranks, world.job_ends or (own[0].over and deserted))


@dataclass(frozen=True)
class Explored:
    states: int
    fault: str = ""


def explore(model: ChannelModel, most: int = 2_000_000) -> Explored:
    """Visit every state, breadth first, so that a fault comes with one of the shortest ways to it.

    Beside what the model itself objects to, it is a fault that an end cannot be reached from some
    state: the ranks hang there, or go round for ever.
    """
    came_from: dict[World, tuple[World, str] | None] = {model.first(): None}
    before: dict[World, list[World]] = {}
    todo, ends = deque(came_from), list[World]()

    def path(world: World) -> str:
        moves: list[str] = []
        while (step := came_from[world]) is not None:
            world, move = step
            moves.append(move)
        return " -> ".join(reversed(moves)) or "at the start"

    while todo:
        world = todo.popleft()
        try:
            if model.is_end(world):
                ends.append(world)
                continue
            following = list(model.moves(world))
        except Fault as fault:
            return Explored(len(came_from), f"{fault}: {path(world)}")
        for move, after in following:
            before.setdefault(after, []).append(world)
            if after not in came_from:
                came_from[after] = world, move
                todo.append(after)
        if len(came_from) > most:
            raise AssertionError(f"more than {most} states")
    ending = set(ends)
    while ends:
        for world in before.get(ends.pop(), ()):
            if world not in ending:
                ending.add(world)
                ends.append(world)
    stuck = next((world for world in came_from if world not in ending), None)
    lost = "" if stuck is None else f"no end can be reached: {path(stuck)}"
    return Explored(len(came_from), lost)


# What a program does with one operation; those of one name are never in one program.
PARTS = (*("a", "a a?", "a~", "b b?", "G", "G G?"), *("s( s)", "s( s) s?", "s(", "join", "listen"))
END = "leave close"
NAMES = set("abcGs")


def programs(parts: int) -> Iterator[str]:
    for chosen in permutations(PARTS, parts):
        names = [part[0] for part in chosen]
        # The thread that fills a step does not wait for anything else meanwhile.
        after = " ".join(chosen).partition("s( ")[2]
        if len(set(names)) == len(names) and ("?" not in after or after.startswith("s)")):
            yield " ".join([*chosen, END])


def may_desert(ranks: Sequence[str]) -> bool:
    """Return whether a program waits for something that another one never submits."""
    for waiting, other in permutations([program.split() for program in ranks], 2):
        waits = {word.rstrip("?") for word in waiting if word.endswith("?") or word == "join"}
        if not waits <= {word.rstrip("(~") for word in other}:
            return True
    # What one rank submits before it joins, and another after it, are two operations.
    sides = [program.partition("join")[::2] for program in ranks]
    return any(
        {word[0] for word in before.split()} & {word[0] for word in after.split()} & NAMES
        for (before, _), (_, after) in permutations(sides, 2)
    )


def short(most: int) -> list[str]:
    return [program for parts in range(most + 1) for program in programs(parts)]
