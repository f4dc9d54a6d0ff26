"""Messages between pairs of ranks, where the engine has them."""

from __future__ import annotations

from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.point_to_point import PointToPoint


@collective
def open_point_to_point(channel: Channel) -> PointToPoint:
    """Return messages between pairs of a channel's members, until it is closed."""
    opened: PointToPoint = channel.run(_Open())
    channel.before_closing(opened.close)
    return opened


class _Open(Operation):
    """An agreed operation, because a round may be using the communicator that it duplicates."""

    def __init__(self) -> None:
        super().__init__()
        self.request = Request("opening messages between pairs of ranks")

    def execute(self, communicator: Communicator) -> PointToPoint:
        return communicator.point_to_point()
