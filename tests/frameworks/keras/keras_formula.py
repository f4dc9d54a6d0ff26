"""What training by SGD must give, in numpy: of keras_fit_cases.dense_model, and of a line."""

from collections.abc import Container, Iterable, Sequence
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
    """Ranks that fit a line to their own batches of each epoch, first together and then alone."""

    def __init__(
        self, batches: list[list[Batch]], after: int, steps: int = 0, block: int = 0
    ) -> None:
        self._batches, self._after, self._steps, self._block = batches, after, steps, block
        self.weights: OfRanks = [[np.ones(3), np.zeros(1)] for _ in batches]
        self._samples, self._taken, self._together = [0.0] * len(batches), 0, after > 0
        self._since, self._samples_per_step = 0, float(sum(len(own[0][0]) for own in batches))

    def epoch(self, flushes: Container[int] = ()) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for step in range(max(map(len, self._batches))):
            active = [rank for rank, own in enumerate(self._batches) if step < len(own)]
            self._taken += 1
            if self._together:
                self._step_together(step, active)
            else:
                self._step_alone(step, active)
            if step in flushes:
                self._average()
                found[step] = self.weights[0]
        self._average()
        return found

    def _step_alone(self, step: int, active: list[int]) -> None:
        for rank in active:
            x, _ = self._batches[rank][step]
            self._samples[rank] += len(x)
            self._move(rank, self._gradient(rank, step))
        self._since += 1
        foretold = round(self._since * self._samples_per_step)
        if foretold >= self._block if self._block else self._since == self._steps:
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
        if self._since == 0:
            return
        together = mean(self.weights, self._samples)
        self.weights = [list(together) for _ in self.weights]
        self._samples_per_step = sum(self._samples) / self._since
        self._samples, self._since = [0.0] * len(self._batches), 0
