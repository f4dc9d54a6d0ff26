"""What ranks could do wrong when some die and the others go on; an exploration has to find it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from model_losses import LossModel
from model_process import Process, Processes, Stage
from model_program import Transition
from model_rank import DONE, Rank

from hvdtrain.core.agreement.decision import Action, ChannelState, Event, Failed, Phase, Voted
from hvdtrain.core.agreement.lifecycle import transition


class KeepsWhatIsPending(LossModel):
    """Abandon the channel without failing what is pending."""

    def _end_pending(self, rank: Rank) -> Rank:
        return rank


class LeavesItsDriver(LossModel):
    """Go on to the next world while the driver is in an engine call of this one."""

    def _is_at_rest(self, process: Process) -> bool:
        return True


class FillsNothing(LossModel):
    """Abandon the channel without completing steps for whose buckets the driver waits."""

    def _abandon(self, process: Process) -> Process:
        after = super()._abandon(process)
        return after._replace(rank=after.rank._replace(steps=process.rank.steps))


class LeavesOthersInCalls(LossModel):
    """Abandon the channel without having calls of others fail."""

    def _abandon(self, process: Process) -> Process:
        return super()._abandon(process)._replace(broken=process.broken)


class TakesOverTheChannel(LossModel):
    """Open the channel of the next world as this one was closed."""

    def _next_life(self, life: ChannelState, size: int) -> ChannelState:
        return replace(life, size=size)


class TakesOverWhoIsBehind(LossModel):
    """Open it with the members that were behind."""

    def _next_life(self, life: ChannelState, size: int) -> ChannelState:
        return ChannelState(size, behind=life.behind)


class KeepsItsSize(LossModel):
    """Open it with as many members as before."""

    def _next_life(self, life: ChannelState, size: int) -> ChannelState:
        return ChannelState(life.size)


class WaitsForTheDead(LossModel):
    """Go on when all members are there."""

    def _goes_on(self, state: Processes, members: Sequence[int]) -> Sequence[int]:
        there = all(state.all[number].stage is Stage.WAITING for number in members)
        return members if there else ()


class WaitsForNobody(LossModel):
    """Go on with those that are there."""

    def _goes_on(self, state: Processes, members: Sequence[int]) -> Sequence[int]:
        return [number for number in members if state.all[number].stage is Stage.WAITING]


class WaitsForNobodyUnseen(WaitsForNobody):
    """The same, found by what comes of it: calls in two worlds at once."""

    def _see_that_it_is_new(self, state: Processes, process: Process) -> None:
        pass


class LeavesWithAllOnly(LossModel):
    """End in order only when all members have left, though some die or go on without this one."""

    def _all_are_through(self, state: Processes, process: Process) -> bool:
        members = [state.all[number] for number in process.group]
        return all(
            member.stage is Stage.OVER or dict(member.rank.ended).get("leave") == DONE
            for member in members
        )


class TellsWhoHasLeft(LossModel):
    """Tell a program of a loss after it has left in order."""

    def _program(
        self, state: Processes, number: int, process: Process
    ) -> Iterator[tuple[str, Process]]:
        if process.broken and dict(process.rank.ended).get("leave") == DONE:
            yield "is told", self._abandon(process)
        yield from super()._program(state, number, process)


WRONG_MODELS: Sequence[type[LossModel]] = (
    KeepsWhatIsPending,
    LeavesItsDriver,
    FillsNothing,
    LeavesOthersInCalls,
    TakesOverTheChannel,
    TakesOverWhoIsBehind,
    KeepsItsSize,
    WaitsForTheDead,
    WaitsForNobody,
    WaitsForNobodyUnseen,
    LeavesWithAllOnly,
    TellsWhoHasLeft,
)


def forgets_that_ranks_are_lost(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Close as after any other failure."""
    return transition(state, replace(event, lost=False) if isinstance(event, Failed) else event)


def goes_on_after_a_loss(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Fail what is pending, and stay open."""
    after, actions = transition(state, event)
    return (replace(after, phase=state.phase) if isinstance(event, Failed) else after), actions


def keeps_what_is_pending(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Close without failing what is pending."""
    after, actions = transition(state, event)
    return after, () if isinstance(event, Failed) else actions


def obeys_votes_when_closed(
    state: ChannelState, event: Event
) -> tuple[ChannelState, tuple[Action, ...]]:
    """Run what was agreed in a call that ended after the channel was abandoned."""
    if state.phase is Phase.CLOSED and isinstance(event, Voted):
        return state, transition(replace(state, phase=Phase.OPEN), event)[1]
    return transition(state, event)


WRONG_RULES: Sequence[Transition] = (
    forgets_that_ranks_are_lost,
    goes_on_after_a_loss,
    keeps_what_is_pending,
    obeys_votes_when_closed,
)
