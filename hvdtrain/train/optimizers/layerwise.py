"""What optimizers share whose steps are as long as each layer's weights allow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

__all__ = ["LayerwiseOptimizer", "norms", "trust_ratios"]


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Steps on layers, which are parameters of two dimensions or more, and on all others.

    Biases and the parameters of normalisations have one dimension at most; they are neither
    decayed nor adapted.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return what `closure`, which computes gradients again, returns.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameters in _alike(group["params"]):
                    self._update(parameters, group, is_layer=parameters[0].ndim > 1)
        return loss

    @abstractmethod
    def _update(
        self, parameters: list[torch.Tensor], group: Mapping[str, Any], is_layer: bool
    ) -> None:
        """Step on parameters of one device and type that have gradients."""


def _alike(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return those with gradients, by device, by type, and by whether they are layers."""
    alike: dict[tuple[torch.device, torch.dtype, bool], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise RuntimeError("LARS and LAMB do not take sparse gradients: use sgd or SparseAdam")
        key = (parameter.device, parameter.dtype, parameter.ndim > 1)
        alike.setdefault(key, []).append(parameter)
    return list(alike.values())


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of each tensor of one device and type, [tensors], in float32 at least."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def trust_ratios(
    weights: torch.Tensor, others: torch.Tensor, ratios: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return by how much each layer's step is multiplied: 1 where one of its norms is 0.

    Args:
        weights: norms of the layers' weights, [layers].
        others: norms of their gradients or steps, [layers].
        ratios: what they are multiplied by where both norms are positive, [layers].
    """
    usable = (weights > 0) & (others > 0)
    return torch.where(usable, ratios, torch.ones_like(ratios)).unbind()
