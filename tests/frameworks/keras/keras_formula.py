"""What training by SGD must give, in numpy: of keras_fit_cases.dense_model, and of a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from exchange_formulas import OfRanks, mean

Array = np.ndarray[Any, Any]
Batch = tuple[Array, Array]


def by_formula(
    weights: list[Array],
    given: Iterable[Batch],
    rates: Sequence[float] = (0.1, 0.1),
    momentum: float = 0.9,
    nesterov: bool = False,
) -> None:
    """Train weights in place; the rate may differ by layer."""
    velocities = [np.zeros_like(weight) for weight in weights]
    w, b, v, c = weights
    for x, y in given:
        hidden = np.tanh(x @ w + b)
        outer = 2 * (hidden @ v + c - y) / y.size
        inner = outer @ v.T * (1 - hidden**2)
        gradients = [x.T @ inner, inner.sum(0), hidden.T @ outer, outer.sum(0)]
        for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            step, velocity = rates[number // 2] * gradient, velocities[number]
            velocity *= momentum
            velocity -= step
            weight += momentum * velocity - step if nesterov else velocity


def loss_of(weights: list[Array], x: Array, y: Array) -> Any:
    w, b, v, c = weights
    return np.mean((np.tanh(x @ w + b) @ v + c - y) ** 2)


class Simulated:
    """Ranks that fit a line to their own batches of each epoch, first together and then alone.

    Args:
        batches: batches of an epoch, by rank.
        after: steps after which ranks take steps alone, once all of them have data.
        steps: steps alone between two averages.
    """

    def __init__(self, batches: list[list[Batch]], after: int, steps: int) -> None:
        self._batches, self._after, self._steps = batches, after, steps
        self.weights: OfRanks = [[np.ones(3), np.zeros(1)] for _ in batches]
        self._samples, self._taken, self._together = [0.0] * len(batches), 0, True

    def epoch(self) -> None:
        """Train on all batches, the ranks with more of them longer."""
        since = 0
        for step in range(max(map(len, self._batches))):
            active = [rank for rank, own in enumerate(self._batches) if step < len(own)]
            self._taken += 1
            if self._together:
                self._step_together(step, active)
                continue
            for rank in active:
                x, _ = self._batches[rank][step]
                self._samples[rank] += len(x)
                self._move(rank, self._gradient(rank, step))
            since = (since + 1) % self._steps
            if since == 0:
                self._average()
        if any(self._samples):
            self._average()

    def _step_together(self, step: int, active: list[int]) -> None:
        found = [self._gradient(rank, step) for rank in active]
        (gradient,) = [mean(found, [float(len(self._batches[rank][step][0])) for rank in active])]
        for rank in range(len(self._batches)):
            self._move(rank, gradient)
        self._together = self._taken < self._after or len(active) < len(self._batches)

    def _gradient(self, rank: int, step: int) -> list[Any]:
        (w, b), (x, y) = self.weights[rank], self._batches[rank][step]
        error = 2 * (x @ w + b - y[:, 0]) / len(x)
        return [x.T @ error, error.sum(keepdims=True)]

    def _move(self, rank: int, gradient: list[Any]) -> None:
        pairs = zip(self.weights[rank], gradient, strict=True)
        self.weights[rank] = [weight - 0.1 * g for weight, g in pairs]

    def _average(self) -> None:
        together = mean(self.weights, self._samples)
        self.weights = [list(together) for _ in self.weights]
        self._samples = [0.0] * len(self._batches)
