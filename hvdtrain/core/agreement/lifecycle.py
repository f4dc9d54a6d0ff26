"""The state machine of a channel on one rank (pure).

    OPEN ------- join submitted ------> JOINING --- all members have joined ---> OPEN
    OPEN, JOINING --- leave submitted -> LEAVING --- all members leave --------> CLOSED
    LEAVING, JOINING --- others wait for members that left: all requests fail -> OPEN
        (also those that a member has not submitted yet, when it does)
    any --- an engine call fails, or close() ----------------------------------> CLOSED

All members call the same primitives, because the actions of a round follow from votes and reports
that are the same on all of them. CLOSED is final: no round begins, and no request is accepted.
"""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.core.agreement.decision import (
    Action,
    BackOff,
    ChannelState,
    Ending,
    EndJoin,
    Event,
    ExchangeReports,
    Fail,
    FailAll,
    Failed,
    JoinOrder,
    Leave,
    Left,
    Notify,
    Phase,
    Refuse,
    ReportsExchanged,
    RoundBegan,
    RunRequests,
    Submitted,
    Vote,
    Voted,
    decide,
)
from hvdtrain.core.agreement.request import JOIN, LEAVE, LISTEN, Request


def transition(state: ChannelState, event: Event) -> tuple[ChannelState, tuple[Action, ...]]:
    """Return the next state and the actions to perform, in order.

    Some actions lead to an event: Vote to Voted, ExchangeReports to ReportsExchanged, and Leave
    to Left.
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
    if isinstance(event, ReportsExchanged):
        return _told(state, event)
    if isinstance(event, Left):
        return replace(state, phase=Phase.CLOSED), ()
    if isinstance(event, Failed):
        state = replace(state, reason=event.reason, lost=event.lost)
    return replace(state, phase=Phase.CLOSED), (FailAll(state.reason),)


def _submitted(state: ChannelState, request: Request) -> tuple[ChannelState, tuple[Action, ...]]:
    if state.phase is Phase.LEAVING or state.phase is Phase.CLOSED:
        return state, (Refuse(state.reason, state.lost),)
    missed = dict(state.deserted)
    reason = missed.pop(request.key, "")
    if reason:
        return replace(state, deserted=tuple(missed.items())), (Refuse(reason, deserted=True),)
    if request is LEAVE:
        return replace(state, phase=Phase.LEAVING), ()
    if request is JOIN:
        return replace(state, phase=Phase.JOINING), ()
    return state, ()


def _voted(state: ChannelState, event: Voted) -> tuple[Action, ...]:
    agreed = event.agreed
    if not agreed:
        return (ExchangeReports(),)
    if agreed[0] is LISTEN:
        return (BackOff(),)
    if state.phase is Phase.OPEN:  # neither JOIN nor LEAVE is pending
        return (RunRequests(agreed),)
    if JOIN in agreed:
        return (ExchangeReports(),)
    if LEAVE not in agreed:
        return (RunRequests(agreed),)
    # LEAVE is the last request whatever the order of the vote: none is accepted after it.
    return (RunRequests(tuple(request for request in agreed if request != LEAVE)), Leave({}))


def _told(state: ChannelState, event: ReportsExchanged) -> tuple[ChannelState, tuple[Action, ...]]:
    decision = decide(event.reports, event.ranks)
    if decision.deserted:
        return _deserted(state, event, decision.deserted), (FailAll(decision.deserted),)
    actions: list[Action] = []
    # Requests of all members run now, and the next round shows which members are still blocked.
    pairs = zip(event.ranks, event.reports, strict=True)
    blocked = tuple(rank for rank, report in pairs if report.blocked)
    if blocked and not decision.run:
        actions.append(Notify(blocked))
    if decision.mismatched:
        actions.append(Fail(decision.mismatched))
    if decision.run:
        actions.append(RunRequests(decision.run))
    if decision.ending is Ending.LEAVE:
        return state, (*actions, Leave(decision.unmet))
    if decision.ending is Ending.JOIN:
        order = _join_order(event, state.behind | decision.behind)
        phase = Phase.OPEN if state.phase is Phase.JOINING else state.phase
        return ChannelState(state.size, phase), (*actions, EndJoin(order))
    if not (decision.run or decision.mismatched):
        actions.append(BackOff())
    return replace(state, behind=state.behind | decision.behind), tuple(actions)


def _deserted(state: ChannelState, event: ReportsExchanged, reason: str) -> ChannelState:
    """Return the state after all reported requests have failed; there may be newer ones.

    A rank that takes part submits the others' requests later, when nobody answers any more.
    """
    marker = LEAVE if state.phase is Phase.LEAVING else JOIN
    own = event.own.requests
    missed = dict(state.deserted)
    if LEAVE not in own and JOIN not in own:
        theirs = {request.key for report in event.reports for request in report.requests}
        known = {request.key for request in (*own, JOIN, LEAVE)}
        missed.update(dict.fromkeys(sorted(theirs - known), reason))
    phase = Phase.OPEN if marker in own else state.phase
    return ChannelState(state.size, phase, deserted=tuple(missed.items()))


def _join_order(event: ReportsExchanged, behind: frozenset[int]) -> JoinOrder:
    seconds = tuple(report.joined_seconds for report in event.reports)
    return JoinOrder(event.ranks, seconds, frozenset(event.ranks[member] for member in behind))
