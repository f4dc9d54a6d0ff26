"""Block momentum (Chen and Huo 2016), written through the seam as a user would.

Every rank takes `period` steps of its own from the weights W_g; then

    G = sum_r(c_r w_r) / sum_r(c_r) - W_g,  D = momentum * D + rate * G,  W = W + D
    W_g = W, or W + momentum * D with Nesterov's look-ahead; the ranks go on from W_g

Without momentum, and with the rate 1, it is local SGD: an average of weights every `period` steps.
"""

from __future__ import annotations

from hvdtrain.arrays import Array, copy
from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    Exchange,
    ExchangeState,
    FilledBucket,
    Kind,
    LocalSteps,
    StepInfo,
)
from hvdtrain.types import ReduceOp

__all__ = ["BlockMomentum"]


class BlockMomentum(Exchange):
    """Move the weights of all ranks by the momentum of what blocks of steps have moved them.

    Args:
        period: steps of a block.
        momentum: of the blocks.
        rate: of the blocks.
        nesterov: let ranks go on from where the momentum leads.
    """

    exactness = "Ranks drift apart for the steps of a block; then all have the same weights."
    kind = Kind.WEIGHTS

    def __init__(
        self, period: int, momentum: float = 0.0, rate: float = 1.0, nesterov: bool = False
    ) -> None:
        self._period, self._momentum, self._rate = period, momentum, rate
        self._nesterov = nesterov
        self.spec = f"block:steps={period},momentum={momentum},rate={rate},nesterov={nesterov}"
        self._anchor = ParameterState("anchor")
        self._velocity, self._ahead = ParameterState("velocity"), ParameterState("ahead")

    def begin(self, bucket: FilledBucket) -> None:
        for part in bucket.parts:
            self._anchor.put(part.index, copy(part.array))
        self._anchor.end()

    def due(self, steps: LocalSteps) -> bool:
        return steps.number >= self._period

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        for part in bucket.parts:
            part.array[...] = part.array - self._anchor.get(part.index, part.array)
        communicators.all_ranks.allreduce(bucket.buffer, ReduceOp.SUM, info.weigh(), 1 / info.size)
        for part in bucket.parts:
            self._move(part.index, part.array)

    def _move(self, index: int, block: Array) -> None:
        """Make of what a block has moved a parameter where the ranks go on."""
        before, ahead = self._velocity.get(index, block), self._ahead.get(index, block)
        velocity = before * self._momentum + block * self._rate
        lead = velocity * (self._momentum if self._nesterov else 0.0)
        # W_g = W + ahead: the anchor holds the model without the last look-ahead.
        block[...] = self._anchor.get(index, block) - ahead + velocity + lead
        self._velocity.put(index, velocity)
        self._ahead.put(index, lead)

    def end(self, info: StepInfo) -> None:
        self._velocity.end()
        self._ahead.end()

    def state(self) -> ExchangeState:
        kept = (self._anchor, self._velocity, self._ahead)
        return ExchangeState(shared={k: v for state in kept for k, v in state.arrays().items()})

    def load(self, state: ExchangeState) -> None:
        for kept in (self._anchor, self._velocity, self._ahead):
            kept.load(state.shared)
