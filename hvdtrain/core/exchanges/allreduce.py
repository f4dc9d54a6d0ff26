"""The default exchange: the average or the sum of all ranks' gradients."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from hvdtrain.core.agreement.operation import Zeros
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.types import DType, ReduceOp


def check_count(name: str, number: int, least: int = 1) -> None:
    """Check that an argument is a whole number that is not too small."""
    try:
        operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {number!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")


def check_positive(name: str, number: float) -> None:
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive number, got {number}")


def check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")


class AllreduceExchange(Exchange):
    """The average g = sum_r(c_r g_r) / sum_r(c_r) with the ranks' weights c_r, or the sum.

    Args:
        op: reduction, AVERAGE or SUM.
        predivide: divisor of gradients before the sum, by which the sum is multiplied again.

    Raises:
        ValueError: an argument is none of these, or predivide is not a positive number.
    """

    exactness = "The exact sum or average, but for the rounding of sums."
    half_types = True
    in_place = True
    stateless = True

    def __init__(self, op: ReduceOp = ReduceOp.AVERAGE, predivide: float = 1.0) -> None:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum, got {op}")
        check_positive("predivide", predivide)
        self.op, self._predivide = op, predivide
        self.takes_samples = op is ReduceOp.AVERAGE
        self.spec = f"allreduce:op={op.value},predivide={float(predivide)!r}"

    @classmethod
    def answering(cls, zeros: Zeros) -> AllreduceExchange:
        return cls(zeros.op, zeros.postscale)

    def factors(self, info: StepInfo) -> tuple[float, float]:
        """Return the factors of this rank's elements, before and after the sum (local)."""
        prescale, postscale = 1.0 / self._predivide, self._predivide
        if self.op is ReduceOp.AVERAGE:
            prescale, postscale = info.weigh(prescale), postscale / info.size
        return prescale, postscale

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        prescale, postscale = self.factors(info)
        placed = bucket.placed
        if placed is not None and info.whole and info.placed:
            met = info.filled and not info.weighted
            placed.reduce(prescale, postscale, everywhere=True, met=met)
            return
        if placed is not None:  # a joined rank, for example, has buckets only
            placed.gather()
        communicators.all_ranks.allreduce(bucket.buffer, ReduceOp.SUM, prescale, postscale)
        if placed is not None:
            placed.scatter()

    def zeros(self, kinds: Sequence[tuple[int, DType]]) -> Zeros:
        return Zeros(tuple(kinds), self.op, postscale=self._predivide)
