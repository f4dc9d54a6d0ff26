"""The life of a channel on one rank: what follows from each event. Pure.

    OPEN ------- join submitted ------> JOINING --- all members have joined ---> OPEN
    OPEN, JOINING --- leave submitted -> LEAVING --- all members leave --------> CLOSED
    LEAVING, JOINING --- others wait in vain: all that is pending fails -------> OPEN
    any --- an engine call fails, or close() ----------------------------------> CLOSED

Every member goes through the same primitives, because what it does in a round follows from votes
and reports that are the same on all of them. CLOSED is final: no round begins, nothing is taken.
"""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.core.agreement.decision import Ending, Report, decide
from hvdtrain.core.agreement.events import (
    Action,
    EndJoin,
    Event,
    Exchange,
    Fail,
    FailAll,
    Failed,
    Leave,
    Left,
    Notify,
    Phase,
    Refuse,
    Rest,
    RoundBegan,
    Run,
    State,
    Submitted,
    Told,
    Vote,
    Voted,
)
from hvdtrain.core.agreement.request import JOIN, LEAVE, LISTEN, Request

__all__ = ["transition"]


def transition(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the next state, and what is to be done, in this order.

    When it is done, Vote leads to Voted, Exchange to Told, and Leave to Left.
    """
    if isinstance(event, Submitted):
        return _submitted(state, event.request)
    if state.phase is Phase.CLOSED:
        return state, ()
    if isinstance(event, RoundBegan):
        requests = event.pending or ((LISTEN,) if event.listening else ())
        return state, (Vote(requests),) if requests else ()
    if isinstance(event, Voted):
        return state, _voted(state, event)
    if isinstance(event, Told):
        return _told(state, event)
    if isinstance(event, Left):
        return replace(state, phase=Phase.CLOSED), ()
    reason = event.reason if isinstance(event, Failed) else state.reason
    return replace(state, phase=Phase.CLOSED, reason=reason), (FailAll(reason),)


def _submitted(state: State, request: Request) -> tuple[State, tuple[Action, ...]]:
    if state.phase is Phase.LEAVING or state.phase is Phase.CLOSED:
        return state, (Refuse(state.reason),)
    if request is LEAVE:
        return replace(state, phase=Phase.LEAVING), ()
    if request is JOIN:
        return replace(state, phase=Phase.JOINING), ()
    return state, ()


def _voted(state: State, event: Voted) -> tuple[Action, ...]:
    agreed = event.agreed
    if not agreed:
        return (Exchange(),)
    if agreed[0] is LISTEN:
        return (Rest(),)
    if state.phase is Phase.OPEN:  # neither JOIN nor LEAVE is pending
        return (Run(agreed),)
    if JOIN in agreed:
        return (Exchange(),)
    if LEAVE not in agreed:
        return (Run(agreed),)
    # Whatever the order of a vote, it is the last: nothing is taken after it.
    return (Run(tuple(request for request in agreed if request != LEAVE)), Leave({}))


def _told(state: State, event: Told) -> tuple[State, tuple[Action, ...]]:
    decision = decide(event.reports, event.ranks)
    if decision.deserted:
        return _without_marker(state, event.own), (FailAll(decision.deserted),)
    actions: list[Action] = []
    # What all have submitted runs now, and the next round shows who is blocked still.
    if not decision.run and any(report.blocked for report in event.reports):
        actions.append(Notify())
    if decision.mismatched:
        actions.append(Fail(decision.mismatched))
    if decision.run:
        actions.append(Run(decision.run))
    if decision.ending is Ending.LEAVE:
        return state, (*actions, Leave(decision.unmet))
    if decision.ending is Ending.JOIN:
        last = event.ranks[_last_to_join(state, event.reports)]
        phase = Phase.OPEN if state.phase is Phase.JOINING else state.phase
        return State(state.size, phase), (*actions, EndJoin(last))
    if not (decision.run or decision.mismatched):
        actions.append(Rest())
    return replace(state, joined=decision.joined), tuple(actions)


def _without_marker(state: State, own: Report) -> State:
    """Return what holds when all that this rank reported is over; it may have gone on since."""
    marker = LEAVE if state.phase is Phase.LEAVING else JOIN
    return State(state.size, Phase.OPEN if marker in own.requests else state.phase)


def _last_to_join(state: State, reports: tuple[Report, ...]) -> int:
    late = [member for member in range(state.size) if member not in state.joined]
    return min(late or range(state.size), key=lambda member: reports[member].joined_seconds)
