"""A model of one channel on all its ranks: programs, drivers, and an engine where they meet.

The rules are those of production: `transition`, with `decide` inside it, and `unanimous`. What is
modelled is around them: programs that submit and wait, threads that take their turns in any order,
and primitives that end when all members have entered the same one.

model_program.py has the words of programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from model_program import RankModel, Transition, compare_ends, is_call, is_stalled, late_names
from model_rank import DESERTED, Fault, Rank, names_of

from hvdtrain.core.agreement.decision import ChannelState, Failed
from hvdtrain.core.agreement.lifecycle import transition


class World(NamedTuple):
    """All ranks, and whether something has happened that ends the job."""

    ranks: tuple[Rank, ...]
    job_ends: bool = False


class ChannelModel:
    """The ranks of a channel, each with a program."""

    def __init__(
        self,
        *programs: str,
        threads: bool = True,
        failing: int | None = None,
        deserts: bool = False,
        rules: Transition = transition,
    ) -> None:
        self._programs = [program.split() for program in programs]
        self._failing, self._deserts = failing, deserts
        self._one = RankModel(threads, rules)
        self._late = late_names(self._programs)

    def first(self) -> World:
        """Return the ranks before they have done anything."""
        life = ChannelState(len(self._programs))
        return World(tuple(Rank(life=life) for _ in self._programs))

    def is_end(self, world: World) -> bool:
        """Return whether every process has ended; see that nothing is left."""
        if not all(rank.over for rank in world.ranks):
            return not world.job_ends and is_stalled(self._programs, world.ranks)
        if not world.job_ends:
            for number, rank in enumerate(world.ranks):
                if rank.pending:
                    raise Fault(f"rank {number} ends with {names_of(rank.pending)} pending")
            compare_ends(world.ranks, {"leave", *self._late})
        return True

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Return what programs, drivers and the engine can do, and what can go wrong."""
        if world.job_ends:
            # An abort ends every process, whatever it does.
            yield "abort", world._replace(ranks=tuple(r._replace(over=True) for r in world.ranks))
            return
        for number, rank in enumerate(world.ranks):
            if rank.over:
                continue
            words = self._programs[number]
            for move, after in (*self._one.program(words, rank), *self._one.driver(words, rank)):
                yield f"{number}: {move}", self._put(world, number, after)
            # In an engine call, or where it waits in one for its program.
            if number == self._failing and rank.actions and is_call(rank.actions[0]):
                failed = self._put(world, number, self._one.fail(words, rank, Failed("the engine")))
                yield f"{number}: engine fails", failed._replace(job_ends=True)
        for move, ranks in self._one.meet(world.ranks):
            yield move, world._replace(ranks=ranks)

    def _put(self, world: World, number: int, rank: Rank) -> World:
        ranks = (*world.ranks[:number], rank, *world.ranks[number + 1 :])
        deserted = any(end == DESERTED for _, end in rank.ended)
        if deserted and not self._deserts:
            raise Fault(f"rank {number} is told of a rank that left, and nobody waits in vain")
        return world._replace(ranks=ranks, job_ends=world.job_ends or (rank.over and deserted))
