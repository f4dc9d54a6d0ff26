"""LAMB: Adam whose step for each layer is scaled to the norm of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hvdtrain.train.optimizers.layerwise import LayerwiseOptimizer, norms, trust_ratios

__all__ = ["Lamb"]


class Lamb(LayerwiseOptimizer):
    """Layer-wise adaptive moments (You et al., arXiv:1904.00962, algorithm 2).

    For each layer w with gradient g in its step number t:

        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * g^2
        u = (m / (1 - beta1^t)) / (sqrt(s / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * (|w| / |u|) * u

    The ratio |w| / |u| is 1 if one of them is 0. Parameters of at most one dimension (biases,
    normalization) take plain Adam steps: ratio 1, no weight decay. Norms are at least float32.

    Args:
        params: parameters, or groups of them.
        lr: global learning rate.
        betas: decay of the mean and of the mean square of gradients.
        eps: number added to the denominator.
        weight_decay: weight decay of layers, inside the ratio.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"Lamb: {name} must be 0 or more, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lamb: betas must be at least 0 and below 1, got {betas}")
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def _update(
        self, parameters: list[torch.Tensor], group: Mapping[str, Any], is_layer: bool
    ) -> None:
        steps = self._adam_steps(parameters, group)
        if is_layer:
            if group["weight_decay"]:
                torch._foreach_add_(steps, parameters, alpha=group["weight_decay"])
            weight_norms, step_norms = norms(parameters), norms(steps)
            ratios = trust_ratios(weight_norms, step_norms, weight_norms / step_norms)
            torch._foreach_mul_(steps, ratios)
        torch._foreach_add_(parameters, steps, alpha=-group["lr"])

    def _adam_steps(
        self, parameters: list[torch.Tensor], group: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Add gradients to the moments; return m / (1 - beta1^t) / (sqrt(s / ...) + eps)."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [self._moments(parameter) for parameter in parameters]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = group["betas"]
        for state in states:
            state["step"] += 1
        taken = [state["step"].item() for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = list(torch._foreach_sqrt(squares))
        torch._foreach_div_(denominators, [(1 - beta2**step) ** 0.5 for step in taken])
        torch._foreach_add_(denominators, group["eps"])
        steps = list(torch._foreach_div(means, [1 - beta1**step for step in taken]))
        torch._foreach_div_(steps, denominators)
        return steps

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the host, as in torch's Adam
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
