"""Gradients of Keras on JAX: traced under jit, or arrays that are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from hvdtrain.core.arrays import reduce as arrays
from hvdtrain.core.arrays.memory import Array
from hvdtrain.core.process.malloc import keep_large_memory
from hvdtrain.core.process_set import global_process_set
from hvdtrain.keras.backends.reduction import Reduction
from hvdtrain.types import ReduceOp

__all__ = ["allreduce", "is_symbolic", "reduce", "settle", "trace_again", "unconverted"]

# What malloc alone keeps anyway.
_LARGE_BYTES = 32 << 20

_TICKET = jax.ShapeDtypeStruct((), np.int32)


def reduce(
    gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction, samples: Any
) -> list[Any]:
    """Return the gradients of all ranks (collective)."""
    rounded = reduction.settings.compression.dtype
    weight = None if samples is None else float(samples)

    def function(given: list[Array]) -> list[Array]:
        return reduction.reduce_arrays(given, variables, weight)

    nbytes = sum(gradient.nbytes for gradient in gradients)
    if nbytes >= _LARGE_BYTES and jax.default_backend() == "cpu":
        keep_large_memory(2 * nbytes, os.environ)  # gradients and what the step makes of them
    sent = [
        gradient.astype(rounded)
        if rounded is not None and jax.numpy.issubdtype(gradient.dtype, np.floating)
        else gradient
        for gradient in gradients
    ]
    return [
        array.astype(gradient.dtype)
        for array, gradient in zip(_call(function, sent), gradients, strict=True)
    ]


def is_symbolic(value: Any) -> bool:
    """Return whether a value is one of a function that is being traced."""
    return isinstance(value, jax.core.Tracer)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def allreduce(value: Any, op: ReduceOp, name: str | None, prescale: float, postscale: float) -> Any:
    """Return the reduction of a traced value; its gradient is reduced likewise (collective)."""

    def function(given: list[Array]) -> list[Array]:
        return arrays.allreduce(given, op, name, prescale, postscale, global_process_set)

    return _call(function, [value])[0]


def _forward(value: Any, *options: Any) -> tuple[Any, None]:
    return allreduce(value, *options), None


def _backward(
    op: ReduceOp, name: str | None, prescale: float, postscale: float, _: None, upstream: Any
) -> tuple[Any]:
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"allreduce with op={op.value} has no gradient: use Average or Sum")
    own = None if name is None else f"{name}.gradient"
    return (allreduce(upstream, op, own, prescale, postscale),)


allreduce.defvjp(_forward, _backward)


def _call(function: Callable[[list[Array]], Sequence[Array]], values: Sequence[Any]) -> list[Any]:
    """Run a function of arrays, whose results are like them, in the order of the program."""
    if not any(is_symbolic(value) for value in values):
        return [jax.numpy.asarray(a) for a in function([np.asarray(value) for value in values])]
    kinds = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    if jax.default_backend() != "cpu":

        def on_host(*given: Any) -> Sequence[Array]:
            return function([np.asarray(array) for array in given])

        return list(io_callback(on_host, kinds, *values, ordered=True))

    def in_place(_: Any, results: Sequence[Any], ticket: Any, *given: Any) -> None:
        made = function([np.asarray(buffer) for buffer in given])
        for result, array in zip(results, [*made, np.asarray(ticket)], strict=True):
            np.asarray(result)[...] = array

    # io_callback hands over arrays of JAX's own that a thread of its pool has to copy first, where
    # all of them may be waiting in callbacks. So it only keeps the order of those in place.
    ticket = io_callback(lambda: np.int32(0), _TICKET, ordered=True)
    aliases = {1 + number: number for number in range(len(kinds))}
    *results, done = buffer_callback(
        in_place, [*kinds, _TICKET], has_side_effect=True, input_output_aliases=aliases
    )(ticket, *values)
    io_callback(lambda _: None, None, done, ordered=True)
    return list(results)


def trace_again(model: Any) -> None:
    """Return: all gradients are dense (local)."""


def settle() -> None:
    """Wait until the steps that were started are done (local)."""
    jax.effects_barrier()


def unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function: nothing rewrites it."""
    return function
