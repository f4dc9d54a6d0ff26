"""The norm of a gradient, and gradients scaled down to a norm."""

from __future__ import annotations

import torch

__all__ = ["clip", "total_norm"]


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients together, [], in float32 at least (local).

    It is finite only where every element is, and 0 for no gradients.
    """
    if not gradients:
        return torch.tensor(0.0)
    types = {gradient.dtype for gradient in gradients}
    if types <= {torch.float32, torch.float64}:
        norms = torch._foreach_norm(gradients)
    else:  # the norm of a float16 would be a float16, which ends at 65504
        wide = torch.float64 if torch.float64 in types else torch.float32
        norms = torch._foreach_norm(gradients, 2, dtype=wide)
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = tuple(norm.to(norms[0].device, torch.float64) for norm in norms)
    return torch.linalg.vector_norm(torch.stack(norms))


def clip(gradients: list[torch.Tensor], norm: float, largest: float) -> None:
    """Multiply gradients by largest / norm where that is below 1, in place (local).

    Args:
        gradients: of all parameters.
        norm: their total_norm().
        largest: what it may be.
    """
    if norm > largest:
        torch._foreach_mul_(gradients, largest / norm)
