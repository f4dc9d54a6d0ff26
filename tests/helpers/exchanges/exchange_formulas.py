"""What the exchanges of the tests must give, computed for all ranks on one process, with numpy.

A parameter's value is a flat array; what all ranks have is a list by rank of lists by parameter.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Flat = npt.NDArray[np.float64]
OfRanks = list[list[Flat]]


def mean(values: OfRanks, weights: Sequence[float]) -> list[Flat]:
    total = sum(weights)
    return [
        sum((w / total * v for w, v in zip(weights, of_ranks, strict=True)), start=0 * of_ranks[0])
        for of_ranks in zip(*values, strict=True)
    ]


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
