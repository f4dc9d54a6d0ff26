"""What training a keras_fit_cases.dense_model by SGD must give, in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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
