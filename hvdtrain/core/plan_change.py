"""Ranks agree that parameters have changed since their bucket plan was made."""

from __future__ import annotations

from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.gradients.request import STEP
from hvdtrain.core.operations import Submitted
from hvdtrain.engines.communicator import Communicator

__all__ = ["agree_on_change"]


class _PlanChange(Operation):
    """Stands where a step of the plan would, so that a rank which steps finds out."""

    def __init__(self, name: str, change: str) -> None:
        super().__init__()
        self.request = Request(STEP, name, (("changed", change),))

    def execute(self, communicator: Communicator) -> None:
        pass


def agree_on_change(channel: Channel, name: str, change: str) -> None:
    """Return when every rank has noticed the same change (collective, instead of a step).

    Args:
        channel: of the plan.
        name: of the plan, which the parameters have outgrown.
        change: what has changed, equal on all ranks.

    Raises:
        MismatchError: another rank takes a step of the plan, or its parameters changed otherwise.
    """
    Submitted(channel, _PlanChange(name, change)).run()
