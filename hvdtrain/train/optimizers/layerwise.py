"""The base of optimizers that scale the step of each layer to its weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

__all__ = ["Lamb", "Lars", "LayerwiseOptimizer", "norms", "trust_ratios"]


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Takes separate steps for layers (parameters of at least two dimensions) and for others.

    Biases and the parameters of normalization have one dimension at most; they are neither decayed
    nor scaled.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step (local)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameters in _grouped(group["params"]):
                    self._update(parameters, group, is_layer=parameters[0].ndim > 1)
        return loss

    @abstractmethod
    def _update(
        self, parameters: list[torch.Tensor], group: Mapping[str, Any], is_layer: bool
    ) -> None:
        """Take a step for parameters of one device and type that have gradients."""


def _grouped(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return parameters with gradients, grouped by device, type, and whether they are layers."""
    groups: dict[tuple[torch.device, torch.dtype, bool], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise RuntimeError("LARS and LAMB do not take sparse gradients: use sgd or SparseAdam")
        key = (parameter.device, parameter.dtype, parameter.ndim > 1)
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of each tensor of one device and type, [tensors], at least float32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def trust_ratios(
    weights: torch.Tensor, others: torch.Tensor, ratios: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the factor of each layer's step: 1 if the norm of its weights or the other is 0."""
    usable = (weights > 0) & (others > 0)
    return torch.where(usable, ratios, torch.ones_like(ratios)).unbind()


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
            state["step"] = torch.tensor(0.0, device="cpu")  # which reads it
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
