"""Rules that do something wrong, which an exploration must find."""

from dataclasses import replace

from hvdtrain.core.agreement.lifecycle import (
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
    transition,
)
from hvdtrain.core.agreement.operation import LEAVE

Result = tuple[ChannelState, tuple[Action, ...]]


def leave_sorted_first(state: ChannelState, event: Event) -> Result:
    """Obey a vote in which the wish to leave is not the last."""
    if isinstance(event, Voted) and LEAVE in event.agreed:
        others = tuple(request for request in event.agreed if request != LEAVE)
        return state, (Leave({}), RunRequests(others))
    return transition(state, event)


def leaves_at_once(state: ChannelState, event: Event) -> Result:
    state, actions = transition(state, event)
    return state, tuple(Leave({}) if isinstance(a, Leave) else a for a in actions)


def drops_what_was_before_join(state: ChannelState, event: Event) -> Result:
    """End the join first, as if nothing was pending."""
    state, actions = transition(state, event)
    ends = [action for action in actions if isinstance(action, EndJoin)]
    return state, tuple(ends) or actions


def takes_what_comes_after_leave(state: ChannelState, event: Event) -> Result:
    if isinstance(event, Submitted) and state.phase is Phase.LEAVING:
        return state, ()
    return transition(state, event)


def goes_on_after_a_failure(state: ChannelState, event: Event) -> Result:
    """Fail what is pending, and stay open."""
    after, actions = transition(state, event)
    return (replace(after, phase=state.phase) if isinstance(event, Failed) else after), actions


def forgets_at_the_end(state: ChannelState, event: Event) -> Result:
    after, actions = leaves_at_once(state, event)
    return after, () if isinstance(event, Closed) else actions


def believes_one_rank(state: ChannelState, event: Event) -> Result:
    if isinstance(event, ReportsExchanged):
        event = replace(event, reports=(event.reports[0],) * state.size)
    return transition(state, event)


def deserts_whoever_waits(state: ChannelState, event: Event) -> Result:
    """Give up as soon as one rank leaves."""
    left = isinstance(event, ReportsExchanged) and [LEAVE in own.requests for own in event.reports]
    if left and any(left) and not all(left):
        return ChannelState(state.size), (FailAll("a rank left"),)
    return transition(state, event)


def joins_by_vote(state: ChannelState, event: Event) -> Result:
    if isinstance(event, Voted) and event.agreed:
        return state, (RunRequests(event.agreed),)
    return transition(state, event)


def reopens_after_join(state: ChannelState, event: Event) -> Result:
    """Forget that this rank leaves when all have joined."""
    after, actions = transition(state, event)
    joined = any(isinstance(action, EndJoin) for action in actions)
    return (replace(after, phase=Phase.OPEN) if joined else after), actions


def forgets_that_ranks_are_lost(state: ChannelState, event: Event) -> Result:
    """Close as after any other failure."""
    return transition(state, replace(event, lost=False) if isinstance(event, Failed) else event)


def keeps_what_is_pending(state: ChannelState, event: Event) -> Result:
    after, actions = transition(state, event)
    return after, () if isinstance(event, Failed) else actions


def obeys_votes_when_closed(state: ChannelState, event: Event) -> Result:
    """Run what was agreed in a call that ended after the channel was abandoned."""
    if state.phase is Phase.CLOSED and isinstance(event, Voted):
        return state, transition(replace(state, phase=Phase.OPEN), event)[1]
    return transition(state, event)


OF_A_CHANNEL = (
    *(deserts_whoever_waits, joins_by_vote, reopens_after_join, leave_sorted_first),
    *(leaves_at_once, drops_what_was_before_join, takes_what_comes_after_leave),
    *(goes_on_after_a_failure, forgets_at_the_end, believes_one_rank),
)
OF_LOSSES = (
    *(forgets_that_ranks_are_lost, goes_on_after_a_failure),
    *(keeps_what_is_pending, obeys_votes_when_closed),
)
