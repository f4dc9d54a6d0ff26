"""What the exchanges of the tests must give, computed for all ranks on one process, with numpy.

A parameter's value is a flat array; what all ranks have is a list by rank of lists by parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.core.gradients.plan import BucketPlan

Flat = npt.NDArray[np.float64]
OfRanks = list[list[Flat]]


def mean(values: OfRanks, weights: Sequence[float]) -> list[Flat]:
    total = sum(weights)
    return [
        sum((w / total * v for w, v in zip(weights, of_ranks, strict=True)), start=0 * of_ranks[0])
        for of_ranks in zip(*values, strict=True)
    ]


class OneBitFormula:
    """1-bit SGD with error feedback between nodes."""

    def __init__(self, nodes: Sequence[int], counts: Sequence[int]) -> None:
        self.ranks = [[r for r, n in enumerate(nodes) if n == node] for node in sorted(set(nodes))]
        self.size, self.owners = len(nodes), min(len(ranks) for ranks in self.ranks)
        self.residual = [[np.zeros(count) for count in counts] for _ in nodes]

    def step(
        self, plan: BucketPlan, gradients: OfRanks, weights: Sequence[float], finite: bool = True
    ) -> list[Flat]:
        """Return the result, by parameter."""
        total = sum(weights)
        x = [
            [w * self.size / total * g + e for g, e in zip(gs, es, strict=True)]
            for w, gs, es in zip(weights, gradients, self.residual, strict=True)
        ]
        if len(self.ranks) == 1:  # nothing crosses a network
            result = [sum(each) / self.size for each in zip(*x, strict=True)]
            lost = [[0 * e for e in es] for es in self.residual]
        else:
            result = [np.zeros_like(each) for each in x[0]]
            lost = [[np.zeros_like(e) for e in es] for es in self.residual]
            for index, low, high, owner in self._slices(plan):
                for ranks in self.ranks:
                    own = sum(x[rank][index][low:high] for rank in ranks)
                    sent = np.abs(own).mean() * np.where(own >= 0, 1.0, -1.0)
                    lost[ranks[owner]][index][low:high] = own - sent
                    result[index][low:high] += sent / self.size
        if finite:
            self.residual = lost
        return result

    def _slices(self, plan: BucketPlan) -> list[tuple[int, int, int, int]]:
        """Return parameter, first and last element, and owner of all that is sent by itself."""
        slices = []
        for bucket in plan.buckets:
            bounds = [bucket.count * owner // self.owners for owner in range(self.owners + 1)]
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                count = plan.specs[index].count
                for owner in range(self.owners):
                    low = max(bounds[owner] - start, 0)
                    high = min(bounds[owner + 1] - start, count)
                    if low < high:
                        slices.append((index, low, high, owner))
        return slices


class BlockFormula:
    def __init__(
        self, weights: list[Flat], size: int, momentum: float, rate: float, nesterov: bool
    ) -> None:
        self.model, self.start = list(weights), list(weights)
        self.velocity = [0 * w for w in weights]
        self._size, self._momentum, self._rate = size, momentum, rate
        self._nesterov = nesterov

    def block(
        self, weights: OfRanks, counts: Sequence[float], share: float = 1.0, flush: bool = False
    ) -> list[Flat]:
        kept = self._momentum**share
        gain = self._rate * self._size * (1 - kept) / share
        lead = self._momentum if self._nesterov and not flush else 0.0
        for index, average in enumerate(mean(weights, counts)):
            velocity = kept * self.velocity[index] + gain * (average - self.start[index])
            self.velocity[index] = velocity
            self.model[index] = self.model[index] + share * velocity
            self.start[index] = self.model[index] + lead * velocity
        return list(self.start)


class DiLoCoFormula:
    """SGD with Nesterov momentum on what ranks have changed."""

    def __init__(self, weights: list[Flat], rate: float, momentum: float) -> None:
        self.start = list(weights)
        self._velocity = [0 * w for w in weights]
        self._rate, self._momentum = rate, momentum

    def round(self, index: int, average: Flat) -> Flat:
        """Return the weights of a parameter from which ranks go on, whose average is given."""
        gradient = self.start[index] - average
        velocity = self._velocity[index] = self._momentum * self._velocity[index] + gradient
        step = self._rate * (gradient + self._momentum * velocity)
        self.start[index] = self.start[index] - step
        return self.start[index]
