"""Visits every state that a model can reach, whatever happens in which order.

In a test:

    seen = explore(model)       # of class Model
    seen.states                 # how many there are
    seen.fault                  # "" or what is wrong, and the moves that lead there
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hvdtrain.core.agreement import driver, lifecycle
from hvdtrain.core.agreement.operation import JOIN, LEAVE, Request, Work, Zeros
from hvdtrain.core.gradients.step import BucketProgress
from hvdtrain.engines.local import LocalCommunicator, _Done
from hvdtrain.types import DType, ReduceOp

S = TypeVar("S", bound=Hashable)


class Fault(Exception):
    """An invariant is broken; the message says which."""


class Model(Protocol[S]):
    def first(self) -> S:
        """Return the state in which all begins."""

    def moves(self, state: S) -> Iterable[tuple[str, S]]:
        """Return what can happen next, each with the state that it leads to."""

    def is_end(self, state: S) -> bool:
        """Return whether nothing needs to happen any more."""


@dataclass(frozen=True)
class Explored:
    states: int
    fault: str = ""


class _Visited(Generic[S]):
    def __init__(self, first: S) -> None:
        self.came_from: dict[S, tuple[S, str] | None] = {first: None}
        self.followers: dict[S, list[S]] = {}

    def path(self, state: S) -> str:
        moves: list[str] = []
        step = self.came_from[state]
        while step is not None:
            before, move = step
            moves.append(move)
            step = self.came_from[before]
        return " -> ".join(reversed(moves)) or "at the start"


def explore(model: Model[S], most: int = 2_000_000) -> Explored:
    """Visit every state, breadth first, so that a fault comes with one of the shortest ways to it.

    Beside what the model itself objects to, it is a fault that an end cannot be reached from some
    state: the ranks hang there, or go round for ever.
    """
    visited: _Visited[S] = _Visited(model.first())
    todo, ends = deque(visited.came_from), []
    while todo:
        state = todo.popleft()
        try:
            if model.is_end(state):
                ends.append(state)
                continue
            following = list(model.moves(state))
        except Fault as fault:
            return Explored(len(visited.came_from), f"{fault}: {visited.path(state)}")
        visited.followers[state] = [after for _, after in following]
        for move, after in following:
            if after not in visited.came_from:
                visited.came_from[after] = state, move
                todo.append(after)
        if len(visited.came_from) > most:
            raise AssertionError(f"more than {most} states")
    stuck = _cannot_end(visited, ends)
    lost = "" if stuck is None else f"no end can be reached: {visited.path(stuck)}"
    return Explored(len(visited.came_from), lost)


def _cannot_end(visited: _Visited[S], ends: list[S]) -> S | None:
    before: dict[S, list[S]] = {}
    for state, following in visited.followers.items():
        for after in following:
            before.setdefault(after, []).append(state)
    ending, todo = set(ends), list(ends)
    while todo:
        for state in before.get(todo.pop(), ()):
            if state not in ending:
                ending.add(state)
                todo.append(state)
    return next((state for state in visited.came_from if state not in ending), None)


# How many buckets a step has.
BUCKETS = 2

SUM = Zeros(((1, DType.FLOAT32),), ReduceOp.SUM)
WORDS = {"join": JOIN, "leave": LEAVE}

# What becomes of an operation.
DONE, DIFFERS, UNMET, DESERTED, FAILED, REFUSED = (
    *("done", "differs", "unmet", "deserted", "failed"),
    "refused",
)


class Ran(NamedTuple):
    """What an engine call has done that has run an operation on all ranks."""

    request: Request
    again: bool


class Bucket(NamedTuple):
    """The next bucket of a step, before ranks have voted on it."""

    request: Request


@dataclass(frozen=True)
class BucketVote:
    """A vote on the next bucket of a step."""

    request: Request
    votes: tuple[int, int, int]


class Heard(NamedTuple):
    """The maxima of all votes on the next bucket of a step."""

    request: Request
    votes: tuple[int, int, int]


# What an engine call has ended with, that the driver takes next.
Outcome = lifecycle.Voted | lifecycle.ReportsExchanged | Ran | Heard

# An engine call.
Call = lifecycle.Vote | lifecycle.Report | Request | BucketVote

# What a driver does next.
Step = lifecycle.Action | Call | Outcome | Bucket


class Rank(NamedTuple):
    place: int = 0
    life: lifecycle.ChannelState = lifecycle.ChannelState(0)
    pending: tuple[Request, ...] = ()
    steps: tuple[tuple[str, BucketProgress], ...] = ()
    actions: tuple[Step, ...] = ()
    ended: tuple[tuple[str, str], ...] = ()
    told: tuple[Request, ...] = ()
    listening: tuple[int, ...] = ()  # for these ranks
    called: bool = False
    at_end: bool = False
    freed: bool = False
    over: bool = False


def repeats(ranks: Iterable[Rank], request: Request) -> bool | None:
    """Return whether an operation has another bucket after this one; None if it cannot run."""
    own = [progress for rank in ranks if (progress := progress_of(rank, request)) is not None]
    if not all(progress.ready for progress in own):
        return None
    return any(progress.reduced + 1 < BUCKETS for progress in own)


def run_here(rank: Rank, request: Request, again: bool) -> Rank:
    """Return a rank after an operation, or a bucket after which there is another one."""
    name, progress = name_of(request), progress_of(rank, request)
    if progress is not None:
        rank = with_progress(rank, name, progress.reduce())
    if again:
        return rank._replace(actions=(Bucket(request), *rank.actions))
    return finish(rank, name, DONE) if takes_part(rank, request) else rank


def hear(rank: Rank, heard: Heard) -> Rank:
    progress = progress_of(rank, heard.request)
    if progress is None:  # an answer, which is complete
        progress = BucketProgress(BUCKETS, BUCKETS, reduced=1)
    verdict = progress.verdict(heard.votes)
    if verdict.certain > progress.reduced:
        return rank._replace(actions=(heard.request, *rank.actions))
    called = (verdict.released and rank.at_end) or (verdict.missed and bool(rank.listening))
    return rank._replace(
        actions=(Bucket(heard.request), *rank.actions), called=rank.called or called
    )


def end_pass(rank: Rank) -> Rank:
    """Return a rank at the end of a backward pass, which may have filled steps of any channel."""
    return rank._replace(steps=tuple((name, own.end_pass()) for name, own in rank.steps))


def progress_of(rank: Rank, request: Request) -> BucketProgress | None:
    """Return how far a step is that is pending here, and of which others know."""
    return dict(rank.steps).get(name_of(request)) if takes_part(rank, request) else None


def fill(rank: Rank, name: str, count: int | None) -> Rank:
    progress = dict(rank.steps).get(name)
    if progress is None:
        return rank
    rest = progress.total - progress.filled
    filled = progress.fill(rest if count is None else count)
    return with_progress(rank, name, filled if count is None else filled.begin_pass())


def abandon(rank: Rank) -> Rank:
    for name, _ in rank.steps:
        rank = fill(rank, name, None)
    return rank


def with_progress(rank: Rank, name: str, progress: BucketProgress) -> Rank:
    return rank._replace(steps=tuple({**dict(rank.steps), name: progress}.items()))


def finish(rank: Rank, name: str, end: str) -> Rank:
    if name in dict(rank.ended):
        raise Fault(f"{name} ends twice")
    pending = tuple(request for request in rank.pending if name_of(request) != name)
    ended = tuple(sorted((*rank.ended, (name, end))))
    steps = tuple(step for step in rank.steps if step[0] != name)
    return rank._replace(pending=pending, ended=ended, steps=steps)


def finish_all(rank: Rank, keys: Iterable[str], end: str) -> Rank:
    chosen = set(keys)
    for request in rank.pending:
        if request.key in chosen and takes_part(rank, request):
            rank = finish(rank, name_of(request), end)
    return rank


def takes_part(rank: Rank, request: Request) -> bool:
    """Return whether others know that an operation is pending here; else it has yet to be run."""
    return is_pending(rank, request) and any(own.key == request.key for own in rank.told)


def is_pending(rank: Rank, request: Request) -> bool:
    return any(own.key == request.key for own in rank.pending)


def name_of(request: Request) -> str:
    return request.name or {JOIN: "join", LEAVE: "leave"}[request]


def names_of(requests: Iterable[Request]) -> str:
    return ", ".join(map(name_of, requests))


@cache
def request_of(word: str) -> Request:
    details = (("shape", "other" if word.endswith("~") else "same"),)
    zeros = None if word.isupper() else SUM
    kind = "step" if word.endswith("(") else "gather" if word.isupper() else "allreduce"
    return Request(kind, word.rstrip("(~"), details, zeros)


class Reasons(dict[str, str]):
    """Reasons by key, as a part of a state."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


def hashable(action: lifecycle.Action) -> lifecycle.Action:
    match action:
        case lifecycle.Fail(reasons):
            return lifecycle.Fail(Reasons(reasons))
        case lifecycle.Leave(unmet):
            return lifecycle.Leave(Reasons(unmet))
    return action


class _Ballots(LocalCommunicator):
    def __init__(self) -> None:
        super().__init__()
        self.own: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.highest: npt.NDArray[np.uint64] | None = None

    def start_max(self, values: npt.NDArray[np.uint64]) -> _Done:
        self.own = values.copy()
        if self.highest is not None:
            values[:] = self.highest
        return _Done()


@cache
def vote(proposed: tuple[tuple[Request, ...], ...]) -> list[tuple[Request, ...]]:
    """Return what production's vote tells each member about these proposals."""
    members = [_Ballots() for _ in proposed]
    for member, requests in zip(members, proposed, strict=True):
        _vote(member, requests)
    highest = np.maximum.reduce([member.own for member in members])
    results = []
    for member, requests in zip(members, proposed, strict=True):
        member.highest = highest
        results.append(tuple(requests[place] for place in _vote(member, requests)))
    return results


def _vote(member: _Ballots, requests: tuple[Request, ...]) -> list[int]:
    positions, _ = driver.vote(member, [Work(request) for request in requests], at_once=True)
    if len(requests) == 1 and member.own.tobytes() != requests[0].ballot * driver.HASHES:
        raise Fault(f"a round with {requests[0]} alone sends another vote")
    return positions
