"""Local SGD: ranks train by themselves, and average their weights from time to time."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    AllreduceExchange,
    Exchange,
    ExchangeState,
    FilledBucket,
    Kind,
    LocalSteps,
    StepInfo,
    check_count,
    parse_inner_state,
)
from hvdtrain.types import ReduceOp


class LocalSGD(Exchange):
    """The average w = sum_r(c_r w_r) / sum_r(c_r) of the weights, every few steps.

    c_r are the samples of rank r since the last average.

    Args:
        steps: steps of each rank between two averages.
        state: what becomes of the state of each rank's optimizer after an average: "keep",
            "average" it as well, or "reset" it, as if the optimizer were new.

    Raises:
        TypeError: `steps` is no whole number.
        ValueError: an argument is out of range.
    """

    exactness = (
        "Ranks drift apart between averages; with steps=1 and SGD without momentum it is the "
        "average of gradients, up to rounding."
    )
    kind = Kind.WEIGHTS

    def __init__(self, steps: int, state: str = "keep") -> None:
        check_count("steps", steps)
        self._steps = steps
        self.inner_state = parse_inner_state(state)
        self.spec = f"local:steps={steps},state={state}"

    def due(self, steps: LocalSteps) -> bool:
        return steps.number >= self._steps

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        communicators.all_ranks.allreduce(bucket.buffer, ReduceOp.SUM, info.weigh(), 1 / info.size)


_AT_FALL = "rate"
_AVERAGES_GRADIENTS, _RATE = "averages gradients", "rate"


class PostLocalSGD(LocalSGD):
    """The average of gradients until a switch, and then local SGD.

    While a rank is without data, and only adds zeros to the gradients of the others, the switch
    waits.

    Args:
        after: number of steps before the switch, or "rate" for a switch after the first step whose
            learning rate is less than that of the step before it.
        steps: steps of each rank between two averages of weights.
        state: as for LocalSGD.

    Raises:
        ValueError: an argument is out of range.
    """

    exactness = (
        "The exact average of gradients until the switch; then ranks drift apart between averages "
        "of weights."
    )

    def __init__(self, after: str | int, steps: int, state: str = "keep") -> None:
        after = str(after)
        if after != _AT_FALL and not (after.isdecimal() and int(after) > 0):
            raise ValueError(f"after must be a number of steps above 0, or rate, got {after}")
        super().__init__(steps, state)
        self.spec = f"postlocal:after={after},steps={steps},state={state}"
        self._after = None if after == _AT_FALL else int(after)
        self._rate = 0.0
        self._plain = AllreduceExchange()
        self._plain.spec = f"{self.spec}, {self._plain.spec} at first"
        self.first: Exchange | None = self._plain

    def due(self, steps: LocalSteps) -> bool:
        if self.first is None:
            return super().due(steps)
        if self._ends_first(steps) and steps.whole:
            self.first = None
        return False

    def _ends_first(self, steps: LocalSteps) -> bool:
        if self._after is not None:
            return steps.total >= self._after
        if steps.rate is None:
            raise ValueError("postlocal: after=rate needs an optimizer with a learning rate, lr")
        falls = steps.rate < self._rate
        if steps.whole or not falls:  # else the next step is compared with the rate before the fall
            self._rate = steps.rate
        return falls

    def state(self) -> ExchangeState:
        first = np.array(self.first is not None)
        return ExchangeState({_AVERAGES_GRADIENTS: first, _RATE: np.array(self._rate)})

    def load(self, state: ExchangeState) -> None:
        if _AVERAGES_GRADIENTS not in state.shared:
            raise ValueError(f"exchange {self.spec!r} was given no {_AVERAGES_GRADIENTS!r}")
        self.first = self._plain if state.shared[_AVERAGES_GRADIENTS] else None
        self._rate = float(state.shared[_RATE])
