"""A model of one channel on all its ranks: programs, drivers, and an engine where they meet.

The rules are those of production: `transition`, with `decide` inside it, and `unanimous`. What is
modelled is around them: programs that submit and wait, threads that take their turns in any order,
and primitives that end when all members have entered the same one.

A program is a line of words:

    a        submit a reduction of this name and go on
    a?       wait until it has ended
    s(       submit a step of two buckets, of which none is filled
    s+       fill one of them
    s)       fill all of them
    G        (upper case) an operation in which a joined rank cannot take part
    a~       submit a reduction of that name with another shape
    listen   take part in rounds with nothing submitted; `deaf` ends that
    join, leave, close
    leaving, joining
             submit the wish and go on, as another thread may; `leave`, `join` then wait for it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from explorer import Fault
from model_rank import (
    BUCKETS,
    DESERTED,
    DIFFERS,
    DONE,
    FAILED,
    REFUSED,
    UNMET,
    WORDS,
    Rank,
    abandon,
    fill,
    finish,
    finish_all,
    hashable,
    is_pending,
    name_of,
    names_of,
    request_of,
    run,
)
from model_vote import vote

from hvdtrain.core.agreement.decision import Report
from hvdtrain.core.agreement.events import (
    Action,
    ChannelState,
    Closed,
    EndJoin,
    Event,
    ExchangeReports,
    Fail,
    FailAll,
    Failed,
    Leave,
    Left,
    Phase,
    Refuse,
    ReportsExchanged,
    RoundBegan,
    RunRequests,
    Submitted,
    Vote,
    Voted,
)
from hvdtrain.core.agreement.lifecycle import transition
from hvdtrain.core.agreement.request import JOIN, LEAVE, Request
from hvdtrain.core.gradients.progress import BucketProgress

__all__ = ["ChannelModel", "Transition", "World"]

Transition = Callable[[ChannelState, Event], tuple[ChannelState, tuple[Action, ...]]]


class World(NamedTuple):
    """All ranks, whether something has happened that ends the job, and whether one is lost."""

    ranks: tuple[Rank, ...]
    faults_left: int
    job_ends: bool = False
    lost: bool = False


class ChannelModel:
    """The ranks of a channel, each with a program; see the top of this file.

    Args:
        programs: of the ranks.
        threads: whether channels have a thread; else only a rank that waits takes part in rounds.
        failing: the rank of which any one engine call may fail.
        dying: the rank that may die at any time.
        survives: whether the others then go on, in whose engine calls errors say so.
        deserts: whether a rank may find that others leave while it waits.
        rules: instead of `transition`, to see that a wrong one is found.
    """

    def __init__(
        self,
        *programs: str,
        threads: bool = True,
        failing: int | None = None,
        dying: int | None = None,
        survives: bool = False,
        deserts: bool = False,
        rules: Transition = transition,
    ) -> None:
        self._programs = [program.split() for program in programs]
        self._threads, self._failing, self._dying = threads, failing, dying
        self._survives, self._deserts, self._rules = survives, deserts, rules
        self._numbers = tuple(range(len(programs)))
        # What one rank submits after it has joined may be another operation than the others'.
        self._late = {
            word.rstrip("(~")
            for words in self._programs
            for place, word in enumerate(words)
            if {"join", "joining"} & set(words[:place]) and word != "join"
        }

    def first(self) -> World:
        """Return the ranks before they have done anything."""
        life = ChannelState(len(self._programs))
        may_fail = self._failing is not None or self._dying is not None
        return World(tuple(Rank(life=life) for _ in self._programs), int(may_fail))

    def is_end(self, world: World) -> bool:
        """Return whether every process has ended; see that nothing is left."""
        if not all(rank.over for rank in world.ranks):
            return not (world.job_ends or world.lost) and self._is_stalled(world)
        for number, rank in enumerate(world.ranks):
            dead = world.lost and number == self._dying
            if rank.pending and not (world.job_ends or dead):
                raise Fault(f"rank {number} ends with {names_of(rank.pending)} pending")
        if not (world.job_ends or world.lost):
            self._compare_ends(world)
        return True

    def _is_stalled(self, world: World) -> bool:
        """Return whether every rank waits for one that never comes, which the stall watch reports.

        Its program is to blame where each rank waits for something that another one, which waits
        as well, has not submitted and cannot be without.
        """
        awaited = [self._awaited(number, rank) for number, rank in enumerate(world.ranks)]
        if not all(awaited):
            return False
        return all(any(self._is_missing(name, other) for other in world.ranks) for name in awaited)

    def _is_missing(self, name: str, rank: Rank) -> bool:
        if name in dict(rank.steps) and not dict(rank.steps)[name].complete:
            return True
        submitted = name in dict(rank.ended) or any(name_of(own) == name for own in rank.pending)
        joined = is_pending(rank, JOIN) and not name.isupper() and name not in WORDS
        left = is_pending(rank, LEAVE)
        return not (submitted or joined or left)

    def _compare_ends(self, world: World) -> None:
        """See that an operation has ended alike on all ranks that submitted it."""
        ends: dict[str, set[str]] = {}
        for rank in world.ranks:
            for name, end in rank.ended:
                ends.setdefault(name, set()).add(end)
        for name, different in ends.items():
            if len(different) > 1 and name not in {"leave", *self._late}:
                raise Fault(f"{name} ended in different ways: {sorted(different)}")
        if DONE in ends.get("join", ()):
            raise Fault("a join ended without the rank that was the last")

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        """Return what programs, drivers and the engine can do, and what can go wrong."""
        if world.job_ends:
            # An abort ends every process, whatever it does.
            yield "abort", world._replace(ranks=tuple(r._replace(over=True) for r in world.ranks))
            return
        for number, rank in enumerate(world.ranks):
            if rank.over:
                continue
            for move, after in (*self._program(number, rank), *self._driver(number, rank)):
                yield f"{number}: {move}", self._put(world, number, after)
            if world.faults_left:
                yield from self._misfortunes(world, number, rank)
            if world.lost and _is_inside(rank):
                after = self._fail(number, rank, Failed("a rank has ended", lost=True))
                self._see_that_it_tells(after)
                yield f"{number}: notices", self._put(world, number, after)
        yield from self._meetings(world)

    def _put(self, world: World, number: int, rank: Rank) -> World:
        ranks = (*world.ranks[:number], rank, *world.ranks[number + 1 :])
        deserted = any(end == DESERTED for _, end in rank.ended)
        if deserted and not self._deserts:
            raise Fault(f"rank {number} is told of a rank that left, and nobody waits in vain")
        return world._replace(ranks=ranks, job_ends=world.job_ends or (rank.over and deserted))

    def _awaited(self, number: int, rank: Rank) -> str:
        """Return what a rank's program waits for now, or ""."""
        words = self._programs[number]
        word = words[rank.place] if rank.place < len(words) else ""
        if word in WORDS:
            return word if is_pending(rank, WORDS[word]) else ""
        name = word[:-1] if word.endswith("?") else ""
        return "" if name in dict(rank.ended) else name

    # What a program does.

    def _program(self, number: int, rank: Rank) -> Iterator[tuple[str, Rank]]:
        words = self._programs[number]
        if rank.place == len(words):
            yield "ends", rank._replace(over=True)
            return
        word = words[rank.place]
        after = rank._replace(place=rank.place + 1)
        if word in ("listen", "deaf"):
            yield word, after._replace(listening=word == "listen")
        elif word.endswith("?"):
            end = dict(rank.ended).get(word[:-1])
            if end in (DESERTED, FAILED):  # an error that ends the program
                yield word, after._replace(over=True)
            elif end is not None:
                yield word, after
        elif word.endswith(("+", ")")):
            yield word, fill(after, word[:-1], 1 if word.endswith("+") else None)
        elif word in ("leaving", "joining"):
            name = {"leaving": "leave", "joining": "join"}[word]
            yield word, self._submit(abandon(after), WORDS[name], name)
        elif word == "close":
            yield word, self._close(after)
        elif word in WORDS and not is_pending(rank, WORDS[word]):
            if word not in dict(rank.ended):
                yield word, self._submit(abandon(rank), WORDS[word], word)
            else:
                # Any other end is an error that ends the program.
                yield f"{word}?", after._replace(over=not dict(rank.ended)[word].startswith(DONE))
        elif word not in WORDS:
            yield word, self._submit(after, request_of(word), word.rstrip("(~"))

    def _submit(self, rank: Rank, request: Request, name: str) -> Rank:
        life, actions = self._rules(rank.life, Submitted(request))
        if any(isinstance(action, Refuse) for action in actions):
            return finish(rank._replace(life=life), name, REFUSED)
        step = ((name, BucketProgress(BUCKETS)),) if request.operation == "step" else ()
        return rank._replace(
            life=life, pending=(*rank.pending, request), steps=(*rank.steps, *step)
        )

    def _close(self, rank: Rank) -> Rank:
        rank = self._follow(rank, Closed())
        while rank.actions and isinstance(rank.actions[0], FailAll):
            rank = self._act(rank._replace(actions=rank.actions[1:]), rank.actions[0])
        if rank.pending:
            raise Fault(f"{names_of(rank.pending)} outlives its channel")
        return rank._replace(freed=True)

    # What a driver does between primitives.

    def _driver(self, number: int, rank: Rank) -> Iterator[tuple[str, Rank]]:
        if not rank.actions:
            busy = rank.life.phase is not Phase.CLOSED and (rank.pending or rank.listening)
            if busy and (self._threads or self._awaited(number, rank)):
                event = RoundBegan(rank.pending, rank.listening)
                yield "round", self._follow(rank._replace(told=rank.pending), event)
            return
        head, *rest = rank.actions
        if isinstance(head, Vote | Report | Request):
            return
        rank = rank._replace(actions=tuple(rest))
        if isinstance(head, ExchangeReports):
            report = self._report(number, rank)
            yield "tells", rank._replace(actions=(report, *rest), told=report.requests)
        else:
            yield type(head).__name__, self._act(rank, head)

    def _act(self, rank: Rank, action: Action | Report | Request) -> Rank:
        match action:
            case RunRequests(requests):
                return rank._replace(actions=(*requests, *rank.actions))
            case Fail(reasons):
                return finish_all(rank, reasons, DIFFERS)
            case Leave(unmet):
                return self._follow(finish(finish_all(rank, unmet, UNMET), "leave", DONE), Left())
            case FailAll():
                if rank.life.phase is not Phase.CLOSED:
                    return finish_all(rank, [own.key for own in rank.told], DESERTED)
                while rank.pending:
                    rank = finish(rank, name_of(rank.pending[0]), FAILED)
            case EndJoin(last):
                before = rank.pending[: rank.pending.index(JOIN)]
                if before:
                    raise Fault(f"join ends with {names_of(before)} pending")
                return finish(rank, "join", f"{DONE}: rank {last} was the last")
        return rank

    def _report(self, number: int, rank: Rank) -> Report:
        awaited = self._awaited(number, rank)
        return Report(
            rank.pending, frozenset(own.key for own in rank.pending if name_of(own) == awaited)
        )

    def _follow(self, rank: Rank, event: Event) -> Rank:
        life, actions = self._rules(rank.life, event)
        return rank._replace(life=life, actions=(*map(hashable, actions), *rank.actions))

    # Where members meet.

    def _meetings(self, world: World) -> Iterator[tuple[str, World]]:
        heads = [rank.actions[0] if rank.actions else None for rank in world.ranks]
        for rank, head in zip(world.ranks, heads, strict=True):
            if isinstance(head, Vote | Report | Request) and rank.freed:
                raise Fault("an engine call after the communicator was given back")
        kinds = {
            head if isinstance(head, Request) else type(head)
            for head in heads
            if isinstance(head, Vote | Report | Request)
        }
        if len(kinds) > 1:
            raise Fault(f"members are in different primitives: {heads}")
        if not all(isinstance(head, Vote | Report | Request) for head in heads):
            return
        ranks = [rank._replace(actions=rank.actions[1:]) for rank in world.ranks]
        if all(isinstance(head, Request) for head in heads):
            (request,) = (head for head in kinds if isinstance(head, Request))
            if (after := run(ranks, request)) is not None:
                yield f"{name_of(request)} runs", world._replace(ranks=after)
        elif all(isinstance(head, Vote) for head in heads):
            proposed = tuple(head.requests for head in heads if isinstance(head, Vote))
            events = [Voted(*pair) for pair in zip(proposed, vote(proposed), strict=True)]
            yield "vote", world._replace(ranks=tuple(map(self._follow, ranks, events)))
        else:
            reports = tuple(head for head in heads if isinstance(head, Report))
            told = [ReportsExchanged(reports, self._numbers, own) for own in reports]
            yield "exchange", world._replace(ranks=tuple(map(self._follow, ranks, told)))

    # What can go wrong.

    def _misfortunes(self, world: World, number: int, rank: Rank) -> Iterator[tuple[str, World]]:
        if number == self._failing and _is_inside(rank):
            after = self._put(world, number, self._fail(number, rank, Failed("the engine")))
            yield f"{number}: engine fails", after._replace(faults_left=0, job_ends=True)
        if number == self._dying:
            dead = self._put(world, number, rank._replace(over=True, actions=()))
            yield (
                f"{number}: dies",
                dead._replace(faults_left=0, job_ends=not self._survives, lost=self._survives),
            )

    def _fail(self, number: int, rank: Rank, event: Failed) -> Rank:
        """Have an engine call fail, which ends everything on this rank."""
        failed = self._follow(rank._replace(actions=()), event)
        while failed.actions:
            failed = self._act(failed._replace(actions=failed.actions[1:]), failed.actions[0])
        if failed.pending:
            raise Fault(f"{names_of(failed.pending)} is pending after a failed engine call")
        if list(self._driver(number, failed)):
            raise Fault("a driver goes on after a failed engine call")
        return failed

    def _see_that_it_tells(self, rank: Rank) -> None:
        """See that later operations fail because ranks are lost, so that the program recovers."""
        _, actions = self._rules(rank.life, Submitted(request_of("later")))
        if not any(isinstance(action, Refuse) and action.lost for action in actions):
            raise Fault("a later operation is not told that ranks are lost")


def _is_inside(rank: Rank) -> bool:
    """Return whether a rank is in an engine call."""
    return bool(rank.actions) and isinstance(rank.actions[0], Vote | Report | Request)
