"""Adasum as an exchange: ranks update with their own gradients, and the updates are combined."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Zeros
from hvdtrain.core.allreduce import adasum
from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, Kind, StepInfo
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.types import DType, ReduceOp

_TYPES = (DType.FLOAT32, DType.FLOAT64)


class AdasumExchange(Exchange):
    """Adasum of the ranks' updates: w = w0 + adasum_r(w_r - w0), for each parameter.

    w0 are the weights before the step, and w_r those of rank r after it.
    """

    spec = "adasum"
    exactness = (
        "Not the average: orthogonal steps of ranks are added, equal ones averaged, for each "
        "parameter, with dot products in float64."
    )
    kind = Kind.WEIGHTS
    whole_tensors = True
    takes_samples = False

    def __init__(self) -> None:
        self._start = ParameterState("start")

    def prepare(self, plan: BucketPlan) -> None:
        for spec in plan.specs:
            if spec.dtype not in _TYPES:
                raise ValueError(
                    f"adasum takes float32 and float64, {spec.name!r} is {spec.dtype.value}"
                )

    def begin(self, bucket: FilledBucket) -> None:
        self._start.keep(bucket)

    @collective
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        # A rank that has joined has no parts: the updates of the others are combined without it.
        for part in bucket.parts:
            part.array[...] = part.array - self._start.get(part.name, part.array)
        parts = [(part.start, part.count) for part in bucket.parts]
        adasum(communicators.all_ranks, bucket.buffer, parts=parts)
        for part in bucket.parts:
            part.array[...] = part.array + self._start.get(part.name, part.array)

    def zeros(self, kinds: Sequence[tuple[int, DType]]) -> Zeros:
        return Zeros(tuple(kinds), ReduceOp.ADASUM)
