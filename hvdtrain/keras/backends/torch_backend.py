"""Gradients of Keras on PyTorch: tensors that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.core.arrays.memory import Array
from hvdtrain.keras.backends.reduction import Reduction

__all__ = ["is_symbolic", "reduce", "settle", "trace_again", "unconverted"]

_HALVES = (torch.float16, torch.bfloat16)


def reduce(
    gradients: Sequence[torch.Tensor],
    variables: Sequence[Any],
    reduction: Reduction,
    samples: Any,
) -> list[torch.Tensor]:
    """Return the gradients of all ranks (collective, blocking)."""
    arrays = [_array(gradient, reduction.settings.compression.dtype) for gradient in gradients]
    weight = None if samples is None else float(samples)
    reduced = reduction.reduce_arrays(arrays, variables, weight)
    return [
        torch.from_numpy(array).to(gradient.device, gradient.dtype)
        for array, gradient in zip(reduced, gradients, strict=True)
    ]


def _array(gradient: torch.Tensor, rounded: str | None) -> Array:
    tensor = gradient.detach().cpu()
    if rounded is not None and tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, rounded))
    # numpy knows no bfloat16, and halves are added in float32.
    array: Array = (tensor.float() if tensor.dtype in _HALVES else tensor).numpy()
    return array


def is_symbolic(value: Any) -> bool:
    """Return False: nothing is traced."""
    return False


def trace_again(model: Any) -> None:
    """Return: all gradients are dense (local)."""


def settle() -> None:
    """Return: nothing goes on in the background (local)."""


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile, with which a user may compile the step, from looking into a function."""
    hidden: Callable[..., Any] = torch.compiler.disable(function)
    return hidden
