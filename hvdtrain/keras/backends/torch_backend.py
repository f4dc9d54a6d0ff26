"""Gradients of Keras on PyTorch: tensors that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.keras.backends.arrays import fused_settings
from hvdtrain.keras.settings import GradientSettings
from hvdtrain.tensors.arrays.fused import reduce_fused
from hvdtrain.tensors.arrays.memory import Array

__all__ = ["reduce", "unconverted"]

_HALVES = (torch.float16, torch.bfloat16)


def reduce(
    gradients: Sequence[torch.Tensor],
    variables: Sequence[Any],
    settings: GradientSettings,
    name: str,
) -> list[torch.Tensor]:
    """Return the gradients of all ranks (collective, blocking)."""
    arrays = [_array(gradient, settings.compression.dtype) for gradient in gradients]
    reduced = reduce_fused(arrays, name, fused_settings(variables, settings))
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


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: nothing rewrites it."""
    return function
