"""The base of optimizers that scale the step of each layer to its weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["LayerwiseOptimizer", "norms", "trust_ratios"]


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
    """Return the factor of each layer's step: 1 if one of its norms is 0.

    Args:
        weights: norms of the layers' weights, [layers].
        others: norms of their gradients or steps, [layers].
        ratios: factors if both norms are positive, [layers].
    """
    usable = (weights > 0) & (others > 0)
    return torch.where(usable, ratios, torch.ones_like(ratios)).unbind()
