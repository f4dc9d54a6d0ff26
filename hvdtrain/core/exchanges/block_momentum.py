"""Block momentum, or blockwise model-update filtering: a momentum of the averages of weights.

Chen and Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with
Intra-block Parallel Optimization and Blockwise Model-update Filtering, 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdtrain.arrays import Array
from hvdtrain.core.exchanges.allreduce import check_momentum, check_positive
from hvdtrain.core.exchanges.state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    Exchange,
    ExchangeState,
    FilledBucket,
    Kind,
    LocalSteps,
    StepInfo,
    parse_inner_state,
)
from hvdtrain.types import ReduceOp

_AHEAD = "look-ahead"


@dataclass(frozen=True)
class _Update:
    momentum: float
    gain: float
    share: float
    ahead: float


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

    def _update(self, info: StepInfo) -> _Update:
        whole = 1 - 1 / info.size if self._momentum is None else self._momentum
        ahead = whole if self.looks_ahead and not info.flush else 0.0
        if not info.drifted:
            return _Update(1.0, 0.0, 0.0, ahead)
        share = (
            info.total / self._block if self._block else info.local_steps / self._steps / info.size
        )
        momentum = whole**share
        gain = self._rate * info.size * (1 - momentum) / share
        return _Update(momentum, gain, share, ahead)

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        for part in bucket.parts:
            part.array[...] = part.array - self._start.get(part.name, part.array)
        if info.drifted:
            communicators.all_ranks.allreduce(
                bucket.buffer, ReduceOp.SUM, info.weigh(), 1 / info.size
            )
        update = self._update(info)
        for part in bucket.parts:
            self._move(part.name, part.array, update)

    def _move(self, name: str, change: Array, update: _Update) -> None:
        """Overwrite the ranks' mean change of a parameter with the weights to continue from."""
        before = self._velocity.get(name, change)
        velocity = before * update.momentum + change * update.gain
        # The ranks started at W + look-ahead.
        model = self._start.get(name, change) - before * self._ahead + velocity * update.share
        change[...] = model + velocity * update.ahead
        self._velocity.put(name, velocity)

    def end(self, info: StepInfo) -> None:
        self._velocity.end()
        self._ahead = self._update(info).ahead

    def state(self) -> ExchangeState:
        return ExchangeState({_AHEAD: np.array(self._ahead), **self._velocity.arrays()})

    def load(self, state: ExchangeState) -> None:
        if _AHEAD not in state.shared:
            raise ValueError(f"exchange {self.spec!r} was given no {_AHEAD}")
        self._ahead = float(state.shared[_AHEAD])
        self._velocity.load(state.shared)
