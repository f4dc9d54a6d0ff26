"""A rank in a model of channels: what it does in a program, and what becomes of its operations."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from hvdtrain.core.agreement import driver, lifecycle
from hvdtrain.core.agreement.operation import JOIN, LEAVE, Request, Work, Zeros
from hvdtrain.core.gradients.step import UNTIL_STEP, BucketProgress
from hvdtrain.engines.communicator import Pending
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.types import DType, ReduceOp


class Fault(Exception):
    """An invariant is broken; the message says which."""


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

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        self.own = values.copy()
        if self.highest is not None:
            values[:] = self.highest
        return Pending(lambda: True)


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
    positions, _ = driver.vote(member, [Work(request) for request in requests], run=True)
    if len(requests) == 1 and member.own.tobytes() != requests[0].ballot * driver.HASHES:
        raise Fault(f"a round with {requests[0]} alone sends another vote")
    return positions


def is_call(step: Step | None) -> TypeGuard[Call]:
    return isinstance(step, lifecycle.Vote | lifecycle.Report | Request | BucketVote)


def outcomes_of(
    ranks: Sequence[Rank], calls: Sequence[Call], members: Sequence[int]
) -> Sequence[Outcome] | None:
    """Return what a call of all members ends with on each; None if it cannot end yet."""
    first = calls[0]
    if any(_kind(call) != _kind(first) for call in calls):
        raise Fault(f"members are in different primitives: {calls}")
    if len(calls) < len(ranks):
        return None
    if isinstance(first, Request):
        again = repeats(ranks, first)
        return None if again is None else [Ran(first, again)] * len(ranks)
    if isinstance(first, BucketVote):
        votes = [call.votes for call in calls if isinstance(call, BucketVote)]
        highest = (max(v[0] for v in votes), max(v[1] for v in votes), max(v[2] for v in votes))
        return [Heard(first.request, highest)] * len(ranks)
    if isinstance(first, lifecycle.Vote):
        proposed = tuple(call.requests for call in calls if isinstance(call, lifecycle.Vote))
        return [lifecycle.Voted(*pair) for pair in zip(proposed, vote(proposed), strict=True)]
    reports = tuple(call for call in calls if isinstance(call, lifecycle.Report))
    return [lifecycle.ReportsExchanged(reports, tuple(members), own) for own in reports]


def _kind(call: Call) -> object:
    return type(call), call if isinstance(call, Request) else getattr(call, "request", None)


def compare_ends(ranks: Iterable[Rank], late: Collection[str]) -> None:
    """See that an operation has ended alike on all ranks that submitted it."""
    ends: dict[str, set[str]] = {}
    for rank in ranks:
        for name, how in rank.ended:
            ends.setdefault(name, set()).add(how)
    for name, different in ends.items():
        if len(different) > 1 and name not in late:
            raise Fault(f"{name} ended in different ways: {sorted(different)}")
    if DONE in ends.get("join", ()):
        raise Fault("a join ended without the rank that was the last")


Result = tuple[lifecycle.ChannelState, tuple[lifecycle.Action, ...]]
Transition = Callable[[lifecycle.ChannelState, lifecycle.Event], Result]


def believes_one_rank(state: lifecycle.ChannelState, event: lifecycle.Event) -> Result:
    """Take the report of the first rank for those of all, as no rule may."""
    if isinstance(event, lifecycle.ReportsExchanged):
        event = replace(event, reports=(event.reports[0],) * state.size)
    return lifecycle.transition(state, event)


Words = Sequence[str]


class RankModel:
    def __init__(self, threads: bool = True, rules: Transition = lifecycle.transition) -> None:
        self._threads, self._rules = threads, rules

    def follow(self, rank: Rank, event: lifecycle.Event) -> Rank:
        """Return the rank after an event, with what its driver is to do."""
        life, actions = self._rules(rank.life, event)
        return rank._replace(life=life, actions=(*map(hashable, actions), *rank.actions))

    def take(self, rank: Rank) -> Rank:
        head, *rest = rank.actions
        rank = rank._replace(actions=tuple(rest))
        if isinstance(head, Ran):
            return run_here(rank, head.request, head.again)
        if isinstance(head, Heard):
            return hear(rank, head)
        assert isinstance(head, lifecycle.Voted | lifecycle.ReportsExchanged)
        after = self.follow(rank, head)
        if rank.life.phase is lifecycle.Phase.CLOSED and after.actions != rank.actions:
            raise Fault(f"a channel that is closed goes on with {after.actions}")
        return after

    def program(self, words: Words, rank: Rank) -> Iterator[tuple[str, Rank]]:
        if rank.place == len(words):
            yield "ends", rank._replace(over=True)
            return
        word = words[rank.place]
        after = rank._replace(place=rank.place + 1)
        if word in ("listen", "deaf"):
            everyone = tuple(range(rank.life.size))
            yield word, after._replace(listening=everyone if word == "listen" else ())
        elif word.endswith("?"):
            end = dict(rank.ended).get(word[:-1])
            if end in (DESERTED, FAILED):  # an error that ends the program
                yield word, after._replace(over=True)
            elif end is not None:
                yield word, after
        elif word.endswith("^"):
            if not rank.at_end:
                yield "pass ends", end_pass(rank)._replace(at_end=True)
            elif rank.called or not awaited(words, rank):
                yield word, after._replace(at_end=False, called=False)
        elif word.endswith("!"):
            step = dict(rank.steps).get(word[:-1])
            if step is not None and step.ready:
                raise Fault("backward() is released that nobody needs")
            yield word, after
        elif word.endswith(("+", ")")):
            yield word, fill(after, word[:-1], 1 if word.endswith("+") else None)
        elif word in ("leaving", "joining"):
            name = {"leaving": "leave", "joining": "join"}[word]
            yield word, self._submit(abandon(after), WORDS[name], name)
        elif word == "close":
            yield word, self.close(after)
        elif word in WORDS and not is_pending(rank, WORDS[word]):
            if word not in dict(rank.ended):
                yield word, self._submit(abandon(rank), WORDS[word], word)
            else:
                # Any other end is an error that ends the program.
                yield f"{word}?", after._replace(over=not dict(rank.ended)[word].startswith(DONE))
        elif word not in WORDS:
            yield word, self._submit(after, request_of(word), word.rstrip("(~"))

    def submit(self, rank: Rank, request: Request) -> tuple[Rank, lifecycle.Refuse | None]:
        """Return the rank after a request, and the refusal if it is refused."""
        life, actions = self._rules(rank.life, lifecycle.Submitted(request))
        refusals = [action for action in actions if isinstance(action, lifecycle.Refuse)]
        return rank._replace(life=life), refusals[0] if refusals else None

    def _submit(self, rank: Rank, request: Request, name: str) -> Rank:
        rank, refusal = self.submit(rank, request)
        if refusal is not None:
            return finish(rank, name, REFUSED)
        step = ((name, BucketProgress(BUCKETS)),) if request.operation == "step" else ()
        return rank._replace(pending=(*rank.pending, request), steps=(*rank.steps, *step))

    def close(self, rank: Rank) -> Rank:
        rank = self.follow(rank, lifecycle.Closed())
        while rank.actions and isinstance(rank.actions[0], lifecycle.FailAll):
            rank = self._act(rank._replace(actions=rank.actions[1:]), rank.actions[0])
        if rank.pending:
            raise Fault(f"{names_of(rank.pending)} outlives its channel")
        return rank._replace(freed=True)

    def fail(self, words: Words, rank: Rank, event: lifecycle.Event) -> Rank:
        failed = self.follow(rank._replace(actions=()), event)
        while failed.actions:
            failed = self._act(failed._replace(actions=failed.actions[1:]), failed.actions[0])
        if failed.pending:
            raise Fault(f"{names_of(failed.pending)} is pending after a failed engine call")
        if list(self.driver(words, failed)):
            raise Fault("a driver goes on after a failed engine call")
        return failed

    def see_that_it_tells(self, rank: Rank) -> None:
        """See that later operations fail because ranks are lost, so that the program recovers."""
        _, refusal = self.submit(rank, request_of("later"))
        if refusal is None or not refusal.lost:
            raise Fault("a later operation is not told that ranks are lost")

    def driver(self, words: Words, rank: Rank) -> Iterator[tuple[str, Rank]]:
        if not rank.actions:
            busy = rank.life.phase is not lifecycle.Phase.CLOSED and (
                rank.pending or rank.listening
            )
            if busy and (self._threads or awaited(words, rank)):
                event = lifecycle.RoundBegan(rank.pending, bool(rank.listening))
                yield "round", self.follow(rank._replace(told=rank.pending), event)
            return
        head, *rest = rank.actions
        if is_call(head):
            return
        if isinstance(head, Bucket):
            own = progress_of(rank, head.request)
            if own is None or own.ready or own.between:
                votes = own.vote(_wait_of(words, rank, head.request)) if own else (0, 0, 0)
                vote = BucketVote(head.request, votes)
                yield "votes on a bucket", rank._replace(actions=(vote, *rest))
            return
        rank = rank._replace(actions=tuple(rest))
        if isinstance(head, lifecycle.ExchangeReports):
            report = _report(words, rank)
            yield "tells", rank._replace(actions=(report, *rest), told=report.requests)
        else:
            yield type(head).__name__, self._act(rank, head)

    def meet(
        self, ranks: Sequence[Rank], members: Sequence[int]
    ) -> Iterator[tuple[str, tuple[Rank, ...]]]:
        """Return what the engine does where all members of a channel have met."""
        calling = [rank for rank in ranks if rank.actions and is_call(rank.actions[0])]
        if any(rank.freed for rank in calling):
            raise Fault("an engine call after the communicator was given back")
        calls = [call for rank in calling if is_call(call := rank.actions[0])]
        if calls and (outcomes := outcomes_of(ranks, calls, members)) is not None:
            yield (
                type(calls[0]).__name__,
                tuple(
                    self.take(rank._replace(actions=(outcome, *rank.actions[1:])))
                    for rank, outcome in zip(ranks, outcomes, strict=True)
                ),
            )

    def _act(self, rank: Rank, action: Step) -> Rank:
        match action:
            case lifecycle.RunRequests(requests):
                return rank._replace(actions=(*requests, *rank.actions))
            case lifecycle.Fail(reasons):
                return finish_all(rank, reasons, DIFFERS)
            case lifecycle.Leave(unmet):
                return self.follow(
                    finish(finish_all(rank, unmet, UNMET), "leave", DONE), lifecycle.Left()
                )
            case lifecycle.FailAll():
                if rank.life.phase is not lifecycle.Phase.CLOSED:
                    return finish_all(rank, [own.key for own in rank.told], DESERTED)
                while rank.pending:
                    rank = finish(rank, name_of(rank.pending[0]), FAILED)
            case lifecycle.Notify(blocked):
                concerned = not set(rank.listening).isdisjoint(blocked)
                return rank._replace(called=rank.called or concerned)
            case lifecycle.EndJoin(order):
                before = rank.pending[: rank.pending.index(JOIN)]
                if before:
                    raise Fault(f"join ends with {names_of(before)} pending")
                return finish(
                    rank, "join", f"{DONE}: rank {lifecycle.last_to_join([order])} was the last"
                )
        return rank


def awaited(words: Words, rank: Rank) -> str:
    word = words[rank.place] if rank.place < len(words) else ""
    if word in WORDS:
        return word if is_pending(rank, WORDS[word]) else ""
    if rank.at_end:
        progress = dict(rank.steps).get(word[:-1])
        return word[:-1] if progress is not None and progress.ready else ""
    name = word[:-1] if word.endswith("?") else ""
    return "" if name in dict(rank.ended) else name


def _wait_of(words: Words, rank: Rank, request: Request) -> int:
    """Return for what a program waits in a step, as `BucketProgress.vote` takes it."""
    if awaited(words, rank) != request.name:
        return 0
    return dict(rank.steps)[request.name].passes if rank.at_end else UNTIL_STEP


def late_names(programs: Iterable[Words]) -> set[str]:
    """Return the names of operations that a rank may submit after others have joined.

    What one rank submits after it has joined may be another operation than the others'.
    """
    return {
        word.rstrip("(~")
        for words in programs
        for place, word in enumerate(words)
        if {"join", "joining"} & set(words[:place]) and word != "join"
    }


def _report(words: Words, rank: Rank) -> lifecycle.Report:
    name = awaited(words, rank)
    return lifecycle.Report(
        rank.pending, frozenset(own.key for own in rank.pending if name_of(own) == name)
    )


def is_stalled(programs: Sequence[Words], ranks: Sequence[Rank]) -> bool:
    """Return whether every rank waits for one that never comes, which the stall watch reports.

    Their programs are to blame where each rank waits for something that another one, which waits as
    well, has not submitted and cannot be without.
    """
    waits = list(map(awaited, programs, ranks))
    if not all(waits):
        return False
    return all(any(_is_missing(name, other) for other in ranks) for name in waits)


def _is_missing(name: str, rank: Rank) -> bool:
    if name in dict(rank.steps) and not dict(rank.steps)[name].complete:
        return True
    submitted = name in dict(rank.ended) or any(name_of(own) == name for own in rank.pending)
    joined = is_pending(rank, JOIN) and not name.isupper() and name not in WORDS
    left = is_pending(rank, LEAVE)
    return not (submitted or joined or left)
