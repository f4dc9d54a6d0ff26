"""What the members of a model's channel come to where all of them have met. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeGuard

from explorer import Fault
from model_rank import DONE, BucketVote, Call, Heard, Outcome, Ran, Rank, Step, repeats
from model_vote import vote

from hvdtrain.core.agreement.decision import Report, ReportsExchanged, Vote, Voted
from hvdtrain.core.agreement.request import Request


def is_call(step: Step | None) -> TypeGuard[Call]:
    """Return whether what a driver does next is an engine call."""
    return isinstance(step, Vote | Report | Request | BucketVote)


def outcomes_of(ranks: Sequence[Rank], calls: Sequence[Call]) -> Sequence[Outcome] | None:
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
    if isinstance(first, Vote):
        proposed = tuple(call.requests for call in calls if isinstance(call, Vote))
        return [Voted(*pair) for pair in zip(proposed, vote(proposed), strict=True)]
    reports = tuple(call for call in calls if isinstance(call, Report))
    return [ReportsExchanged(reports, tuple(range(len(reports))), own) for own in reports]


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
