"""Gradients of Keras on JAX: traced under jit, or arrays that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdtrain.keras.reduction import Reduction
from hvdtrain.tensors.arrays.memory import Array

__all__ = ["reduce", "settle", "unconverted"]


def reduce(
    gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction, samples: Any
) -> list[Any]:
    """Return the gradients of all ranks (collective)."""
    rounded = reduction.settings.compression.dtype
    weight = None if samples is None else float(samples)

    def function(*given: Any) -> list[Array]:
        return reduction.reduce_arrays([np.asarray(array) for array in given], variables, weight)

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


def settle() -> None:
    """Wait until the steps that were started are done (local)."""
    jax.effects_barrier()


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: nothing rewrites it."""
    return function
