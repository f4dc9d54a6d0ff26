"""LARS: momentum whose step for each layer is a fixed fraction of the norm of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hvdtrain.train.optimizers.layerwise import LayerwiseOptimizer, norms, trust_ratios

__all__ = ["Lars"]


class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg, arXiv:1708.03888).

    For each layer w with gradient g, with the learning rate inside the momentum as in the paper:

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        v = momentum * v + lr * ratio * (g + weight_decay * w)
        w = w - v

    The ratio is 1 if |w| or |g| is 0. Parameters of at most one dimension (biases, normalization)
    take plain momentum steps: ratio 1, no weight decay. Norms are at least float32.

    Args:
        params: parameters, or groups of them.
        lr: global learning rate.
        momentum: momentum of the steps.
        weight_decay: weight decay of layers.
        trust_coefficient: length of a step relative to the weights at lr 1.
        eps: number added to the denominator.

    Raises:
        ValueError: an argument is negative.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
        }
        for name, value in settings.items():
            if not value >= 0:
                raise ValueError(f"Lars: {name} must be 0 or more, got {value}")
        super().__init__(params, settings)

    def _update(
        self, parameters: list[torch.Tensor], group: Mapping[str, Any], is_layer: bool
    ) -> None:
        steps = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if is_layer:
            steps = _scaled(parameters, steps, group)
        velocities = [self._velocity(parameter) for parameter in parameters]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps, alpha=group["lr"])
        torch._foreach_sub_(parameters, velocities)

    def _velocity(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity: torch.Tensor = state["momentum_buffer"]
        return velocity


def _scaled(
    weights: list[torch.Tensor], gradients: list[torch.Tensor], group: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return ratio * (g + weight_decay * w) for each layer."""
    decay = group["weight_decay"]
    weight_norms, gradient_norms = norms(weights), norms(gradients)
    denominators = gradient_norms + decay * weight_norms + group["eps"]
    ratios = group["trust_coefficient"] * weight_norms / denominators
    # The decay is added to a copy, never to the gradients themselves.
    steps = list(torch._foreach_add(gradients, weights, alpha=decay))
    torch._foreach_mul_(steps, trust_ratios(weight_norms, gradient_norms, ratios))
    return steps
