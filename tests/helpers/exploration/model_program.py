"""What the members of a model's channel come to where all of them have met. Pure."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeGuard

from model_rank import (
    BUCKETS,
    DESERTED,
    DIFFERS,
    DONE,
    FAILED,
    REFUSED,
    UNMET,
    WORDS,
    Bucket,
    BucketVote,
    Call,
    Fault,
    Heard,
    Outcome,
    Ran,
    Rank,
    Step,
    abandon,
    end_pass,
    fill,
    finish,
    finish_all,
    hashable,
    hear,
    is_pending,
    name_of,
    names_of,
    progress_of,
    repeats,
    request_of,
    run_here,
    vote,
)

from hvdtrain.core.agreement import lifecycle
from hvdtrain.core.agreement.operation import JOIN, LEAVE, Request
from hvdtrain.core.gradients.step import UNTIL_STEP, BucketProgress


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


Transition = Callable[
    [lifecycle.ChannelState, lifecycle.Event],
    tuple[lifecycle.ChannelState, tuple[lifecycle.Action, ...]],
]
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
