"""Optimizer steps on contiguous elements, as Keras's optimizers take them (local)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdtrain.arrays import HostArray


def cast(number: float, dtype: np.dtype[Any]) -> Any:
    """Return a setting in the type of the weights, by way of float32, as Keras casts numbers."""
    return dtype.type(np.float32(number))


class UpdateRule(Protocol):
    """How an optimizer updates each element by itself."""

    @property
    def quantities(self) -> Sequence[str]: ...

    def update(
        self,
        weights: HostArray,
        gradient: HostArray,
        state: Sequence[HostArray],
        rate: float,
        steps: int,
    ) -> None:
        """Update weights and state, [n] for each quantity, in place; overwrite the gradient."""


@dataclass(frozen=True)
class SgdRule:
    """v = momentum v - rate g; w = w + v, or w + momentum v - rate g with Nesterov's momentum."""

    momentum: float
    nesterov: bool

    @property
    def quantities(self) -> Sequence[str]:
        return ("momentum",) if self.momentum else ()

    def update(
        self,
        weights: HostArray,
        gradient: HostArray,
        state: Sequence[HostArray],
        rate: float,
        steps: int,
    ) -> None:
        momentum = cast(self.momentum, weights.dtype)
        gradient *= weights.dtype.type(rate)
        if not state:
            weights -= gradient
            return
        (velocity,) = state
        velocity *= momentum
        velocity -= gradient
        if self.nesterov:
            weights += velocity * momentum - gradient
        else:
            weights += velocity


@dataclass(frozen=True)
class AdamRule:
    """Adam (arXiv 1412.6980), in the form before section 2.1 of the paper, as Keras computes it."""

    beta_1: float
    beta_2: float
    epsilon: float
    amsgrad: bool

    @property
    def quantities(self) -> Sequence[str]:
        return ("momentum", "velocity", *(("velocity_hat",) if self.amsgrad else ()))

    def update(
        self,
        weights: HostArray,
        gradient: HostArray,
        state: Sequence[HostArray],
        rate: float,
        steps: int,
    ) -> None:
        kind = weights.dtype.type
        power_1, power_2 = (
            np.power(cast(beta, weights.dtype), kind(steps + 1))
            for beta in (self.beta_1, self.beta_2)
        )
        alpha = kind(rate) * np.sqrt(kind(1) - power_2) / (kind(1) - power_1)
        first, second = state[:2]
        change = gradient - first
        change *= kind(1 - self.beta_1)
        first += change
        np.multiply(gradient, gradient, out=change)
        change -= second
        change *= kind(1 - self.beta_2)
        second += change
        if self.amsgrad:
            second = np.maximum(state[2], second, out=state[2])
        np.sqrt(second, out=change)
        change += kind(self.epsilon)
        np.multiply(first, alpha, out=gradient)
        gradient /= change
        weights -= gradient
