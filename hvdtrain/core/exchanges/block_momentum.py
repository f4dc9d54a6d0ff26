"""Block momentum, or blockwise model-update filtering: a momentum of the averages of weights.

Chen and Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with
Intra-block Parallel Optimization and Blockwise Model-update Filtering, 2016.
"""

from __future__ import annotations

import numpy as np

from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    Exchange,
    ExchangeState,
    FilledBucket,
    Kind,
    LocalSteps,
    StepInfo,
    check_momentum,
    check_positive,
    parse_inner_state,
)
from hvdtrain.types import ReduceOp

_AHEAD = "look-ahead"


class BlockMomentum(Exchange):
    """Update the model W by a velocity D of the changes that blocks of steps make.

    Ranks take steps by themselves from common weights V. At the end of a block of n samples

        G = sum_r(c_r w_r) / sum_r(c_r) - V
        s = n / block, m = momentum^s
        D = m D + rate * size * (1 - m) / s * G
        W = W + s D
        V = W + momentum * D with nesterov, otherwise V = W

    where c_r are the samples of rank r. With whole blocks (s = 1) it is the published algorithm. A
    constant change per sample moves the model at the speed of SGD on all samples in turn, for any
    lengths of blocks. A flush ends the block early and leaves the ranks with V = W.

    Args:
        block: samples of a block, of all ranks together; 0 if `steps` is given.
        steps: steps of each rank in a block, instead of `block`.
        momentum: momentum from block to block; by default 1 - 1/size.
        time_constant: number of samples after which a change has decayed to 1/e, instead of
            `momentum`: momentum = exp(-block / time_constant).
        rate: speed of the model relative to SGD on all samples in turn.
        nesterov: whether ranks continue from where the momentum leads.
        state: what becomes of the state of each rank's optimizer after a block: "keep", "average"
            it as well, or "reset" it, as if the optimizer were new (CNTK's resetSGDMomentum).

    Raises:
        ValueError: an argument is out of range, or arguments contradict each other.
    """

    exactness = "Ranks drift apart for the samples of a block; then all have the same weights."
    kind = Kind.WEIGHTS

    def __init__(
        self,
        block: int = 0,
        steps: int = 0,
        momentum: float | None = None,
        time_constant: float | None = None,
        rate: float = 1.0,
        nesterov: bool = True,
        state: str = "reset",
    ) -> None:
        if min(block, steps) < 0 or (block > 0) == (steps > 0):
            raise ValueError(
                f"give block= (samples of all ranks) or steps= (of each rank), above 0, got "
                f"block={block} and steps={steps}"
            )
        if time_constant is not None:
            if momentum is not None or not block:
                raise ValueError("time_constant needs block, and takes the place of momentum")
            check_positive("time_constant", time_constant)
            momentum = float(np.exp(-block / time_constant))
        if momentum is not None:
            check_momentum(momentum)
        check_positive("rate", rate)
        self._block, self._steps, self._momentum, self._rate = block, steps, momentum, rate
        self.looks_ahead, self.inner_state = nesterov, parse_inner_state(state)
        self.counts_samples = block > 0
        length = f"block={block}" if block else f"steps={steps}"
        self.spec = (
            f"blockmomentum:{length},momentum={momentum},rate={float(rate)!r},"
            f"nesterov={nesterov},state={state}"
        )
        self._start, self._velocity = ParameterState("start"), ParameterState("velocity")
        self._ahead = 0.0

    def begin(self, bucket: FilledBucket) -> None:
        self._start.keep(bucket)

    def due(self, steps: LocalSteps) -> bool:
        if self._steps:
            return steps.number >= self._steps
        if steps.samples is None:
            raise ValueError(
                "blockmomentum: block= counts samples: set optimizer.sample_weight to the number "
                "of samples before each step, or give steps= instead"
            )
        return round(steps.number * steps.samples) >= self._block

    def _momentum_of(self, info: StepInfo) -> float:
        return 1 - 1 / info.size if self._momentum is None else self._momentum

    def _ahead_after(self, info: StepInfo) -> float:
        return self._momentum_of(info) if self.looks_ahead and not info.flush else 0.0

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        for part in bucket.parts:
            part.array[...] = part.array - self._start.get(part.name, part.array)
        momentum, gain, share, ahead = 1.0, 0.0, 0.0, self._ahead_after(info)
        if info.drifted:
            communicators.all_ranks.allreduce(
                bucket.buffer, ReduceOp.SUM, info.weigh(), 1 / info.size
            )
            share = (
                info.total / self._block
                if self._block
                else info.local_steps / self._steps / info.size
            )
            momentum = self._momentum_of(info) ** share
            gain = self._rate * info.size * (1 - momentum) / share
        for part in bucket.parts:  # the ranks' mean changes
            before = self._velocity.get(part.name, part.array)
            velocity = before * momentum + part.array * gain
            # The ranks started at W + look-ahead.
            model = self._start.get(part.name, part.array) - before * self._ahead + velocity * share
            part.array[...] = model + velocity * ahead
            self._velocity.put(part.name, velocity)

    def end(self, info: StepInfo) -> None:
        self._velocity.end()
        self._ahead = self._ahead_after(info)

    def state(self) -> ExchangeState:
        return ExchangeState({_AHEAD: np.array(self._ahead), **self._velocity.arrays()})

    def load(self, state: ExchangeState) -> None:
        if _AHEAD not in state.shared:
            raise ValueError(f"exchange {self.spec!r} was given no {_AHEAD}")
        self._ahead = float(state.shared[_AHEAD])
        self._velocity.load(state.shared)
