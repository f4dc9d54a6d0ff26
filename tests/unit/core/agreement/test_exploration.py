"""The life of a channel in every order of events: nothing hangs, is lost, or outlives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from channel_model import ChannelModel
from model_program import Transition
from model_rank import Explored, explore
from program_lists import END, may_desert, short

from hvdtrain.core.agreement.decision import (
    Action,
    ChannelState,
    Closed,
    EndJoin,
    Event,
    FailAll,
    Failed,
    Leave,
    Phase,
    ReportsExchanged,
    RunRequests,
    Submitted,
    Voted,
)
from hvdtrain.core.agreement.lifecycle import transition
from hvdtrain.core.agreement.request import LEAVE

EXHAUSTIVE = os.environ.get("HVDTRAIN_TEST_EXHAUSTIVE") == "1"


def explored(*ranks: str, **how: object) -> Explored:
    """Explore these programs, and fail on a fault."""
    seen = explore(ChannelModel(*ranks, deserts=may_desert(ranks), **how))  # type: ignore[arg-type]
    assert not seen.fault, f"{ranks} {how}: {seen.fault}"
    return seen


# All of them are more than two million states.
SOME = [f"{part} {END}" for part in ("a", "a a?", "s(", "G G?", "join")] + [END]
FEW, MORE = short(1), short(2)
TRIPLES = product(FEW, repeat=3) if EXHAUSTIVE else combinations_with_replacement(SOME, 3)


@pytest.mark.parametrize(
    "first", [MORE[::8], pytest.param(MORE, marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_two_ranks(first: list[str]) -> None:
    pairs = product(first, MORE if EXHAUSTIVE else FEW)
    print(sum(explored(*pair).states for pair in pairs), "states")


def test_two_ranks_without_threads() -> None:
    pairs = product(MORE, MORE) if EXHAUSTIVE else product(FEW, FEW)
    print(sum(explored(*pair, threads=False).states for pair in pairs), "states")


def test_three_ranks() -> None:
    print(sum(explored(*ranks).states for ranks in TRIPLES), "states")


# Three operations, in other orders on each rank, sound and unsound.
LONG = [
    ("a b s( s) a? b? s? leave close", "s( b a s) s? b? a? leave close"),
    ("a s( join leave close", "b join leave close"),
    ("s( s+ a s) s? leave close", "a s~( s) s? a? leave close"),
    ("s( s+ leave close", "s( s) s? leave close", "s( s) s? join leave close"),
    ("b leaving a leave close", "b b? leave close"),
    ("joining a join leave close", "a~ join leave close"),
    ("a joining leaving join leave close", "join leave close"),
    ("a b join c~ c? leave close", "join c leave close"),
    ("a a? joining leaving b join leave close", "a join leave close"),
    ("a listen b b? deaf a? leave close", "b b? a a? leave close"),
    ("a b a? b? leave close", "b a b? a? leave close", "a b leave close"),
    ("a join leave close", "join leave close", "a a? b b? join leave close"),
]
# More states than all of these.
LONGEST = ("a s( leave close", "s( s) b leave close", "a b leave close")


@pytest.mark.parametrize(
    "ranks", [*LONG, pytest.param(LONGEST, marks=pytest.mark.soak)], ids=" / ".join
)
def test_longer_programs(ranks: tuple[str, ...]) -> None:
    seen = [explored(*ranks), explored(*ranks, threads=False)]
    for member in range(len(ranks)):
        seen += [explored(*ranks, failing=member), explored(*ranks, dying=member)]
        seen.append(explored(*ranks, dying=member, survives=True))
    print(sum(one.states for one in seen), "states")


def leave_sorted_first(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Obey a vote in which the wish to leave is not the last."""
    if isinstance(event, Voted) and LEAVE in event.agreed:
        others = tuple(request for request in event.agreed if request != LEAVE)
        return state, (Leave({}), RunRequests(others))
    return transition(state, event)


def leaves_at_once(state: ChannelState, event: Event) -> tuple[ChannelState, tuple[Action, ...]]:
    """Leave without a word about what is still pending."""
    state, actions = transition(state, event)
    return state, tuple(Leave({}) if isinstance(a, Leave) else a for a in actions)


def drops_what_was_before_join(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """End the join first, as if nothing was pending."""
    state, actions = transition(state, event)
    ends = [action for action in actions if isinstance(action, EndJoin)]
    return state, tuple(ends) or actions


def takes_what_comes_after_leave(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    if isinstance(event, Submitted) and state.phase is Phase.LEAVING:
        return state, ()
    return transition(state, event)


def goes_on_after_a_failure(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    after, actions = transition(state, event)
    return (replace(after, phase=state.phase) if isinstance(event, Failed) else after), actions


def forgets_at_the_end(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Close without failing what is pending, and leave without looking at it."""
    after, actions = leaves_at_once(state, event)
    return after, () if isinstance(event, Closed) else actions


def believes_one_rank(state: ChannelState, event: Event) -> tuple[ChannelState, tuple[Action, ...]]:
    """Follow the first report only."""
    if isinstance(event, ReportsExchanged):
        event = replace(event, reports=(event.reports[0],) * state.size)
    return transition(state, event)


def deserts_whoever_waits(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Give up as soon as one rank leaves."""
    left = isinstance(event, ReportsExchanged) and [LEAVE in own.requests for own in event.reports]
    if left and any(left) and not all(left):
        return ChannelState(state.size), (FailAll("a rank left"),)
    return transition(state, event)


def joins_by_vote(state: ChannelState, event: Event) -> tuple[ChannelState, tuple[Action, ...]]:
    """Run the wish to join as any operation."""
    if isinstance(event, Voted) and event.agreed:
        return state, (RunRequests(event.agreed),)
    return transition(state, event)


def reopens_after_join(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Forget that this rank leaves when all have joined."""
    after, actions = transition(state, event)
    joined = any(isinstance(action, EndJoin) for action in actions)
    return (replace(after, phase=Phase.OPEN) if joined else after), actions


def forgets_that_ranks_are_lost(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Close as after any other failure."""
    return transition(state, replace(event, lost=False) if isinstance(event, Failed) else event)


MUTATIONS = [
    forgets_that_ranks_are_lost,
    deserts_whoever_waits,
    joins_by_vote,
    reopens_after_join,
    leave_sorted_first,
    leaves_at_once,
    drops_what_was_before_join,
    takes_what_comes_after_leave,
    goes_on_after_a_failure,
    forgets_at_the_end,
    believes_one_rank,
]


@pytest.mark.parametrize("rules", MUTATIONS)
def test_a_wrong_rule_is_found(rules: Transition) -> None:
    def faults() -> Iterator[str]:
        for ranks in (*LONG, *product(SOME, SOME)):
            deserts = may_desert(ranks)
            yield explore(ChannelModel(*ranks, deserts=deserts, rules=rules)).fault
            yield explore(ChannelModel(*ranks, deserts=deserts, failing=0, rules=rules)).fault
            how = {"dying": 0, "survives": True, "deserts": deserts}
            yield explore(ChannelModel(*ranks, rules=rules, **how)).fault  # type: ignore[arg-type]

    assert any(faults())
