"""Local SGD: ranks train by themselves, and average their weights from time to time."""

from __future__ import annotations

from hvdtrain.core.exchanges.checks import check_count
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, Kind, LocalSteps, StepInfo
from hvdtrain.core.gradients.inner_state import parse_inner_state
from hvdtrain.types import ReduceOp

__all__ = ["LocalSGD"]


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
