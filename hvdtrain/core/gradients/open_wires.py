"""The communicators of an exchange, made by all ranks of a plan together."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.request import STEP
from hvdtrain.core.gradients.wires import Wires
from hvdtrain.engines.communicator import Communicator

__all__ = ["open_wires"]


def open_wires(channel: Channel, exchange: Exchange, node: int, name: str) -> Wires:
    """Return what an exchange over a channel communicates by (collective if it wants nodes apart).

    The communicators are given back with the channel.

    Args:
        channel: of the plan.
        exchange: equal on all ranks.
        node: the number of this rank's node.
        name: of the plan's steps.

    Raises:
        MismatchError: another rank takes a step of the plan with another exchange.
    """
    if not exchange.apart:
        return Wires.flat(channel.communicator)
    wires: Wires = channel.run(_OpenWires(exchange.spec, node, name))
    channel.before_closing(wires.close)
    return wires


class _OpenWires(Operation):
    """Make the communicators: engines do it by way of the old one, with all members there.

    It stands where a step of the plan would, so that a rank which steps finds out.
    """

    def __init__(self, spec: str, node: int, name: str) -> None:
        super().__init__()
        self._node = node
        self.request = Request(STEP, name, (("nodes for exchange", spec),))

    def execute(self, communicator: Communicator) -> Wires:
        nodes = np.empty(communicator.size, np.int64)
        communicator.allgather(
            Buffer.from_array(np.array([self._node], np.int64)),
            Buffer.from_array(nodes),
            [1] * communicator.size,
        )
        return Wires.apart(communicator, nodes.tolist())
