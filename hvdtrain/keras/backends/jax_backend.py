"""Gradients of Keras on JAX: traced under jit, or arrays that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdtrain.keras.backends.arrays import fused_settings
from hvdtrain.keras.settings import GradientSettings
from hvdtrain.tensors.arrays.fused import reduce_fused
from hvdtrain.tensors.arrays.memory import Array

__all__ = ["reduce", "unconverted"]


def reduce(
    gradients: Sequence[Any], variables: Sequence[Any], settings: GradientSettings, name: str
) -> list[Any]:
    """Return the gradients of all ranks (collective)."""
    rounded = settings.compression.dtype
    fused = fused_settings(variables, settings)

    def function(*given: Any) -> list[Array]:
        return reduce_fused([np.asarray(array) for array in given], name, fused)

    sent = [
        gradient.astype(rounded)
        if rounded is not None and jax.numpy.issubdtype(gradient.dtype, np.floating)
        else gradient
        for gradient in gradients
    ]
    kinds = [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in sent]
    # Ordered: ranks must come to their reductions in one order.
    reduced = io_callback(function, kinds, *sent, ordered=True)
    return [
        array.astype(gradient.dtype) for array, gradient in zip(reduced, gradients, strict=True)
    ]


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: nothing rewrites it."""
    return function
