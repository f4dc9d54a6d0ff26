"""Keras on JAX, whose gradients are traced under jit or arrays with values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays import collectives
from hvdtrain.core.arrays.fused import ReduceArrays
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.operations import check_has_gradient
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.core.tuning import keep_large_memory
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.backend import Backend, HostFunction, HostQuestion, Tensors
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable, Value
from hvdtrain.types import ReduceOp

# malloc keeps smaller amounts of memory without being told.
_LARGE_BYTES = 32 << 20

_TICKET = jax.ShapeDtypeStruct((), np.int32)


class JaxBackend(Backend):
    def to_array(self, tensor: jax.Array) -> HostArray:
        return np.asarray(tensor)

    def from_array(self, array: HostArray, like: jax.Array) -> jax.Array:
        return jax.numpy.asarray(array)

    def exchange_if(
        self, due: HostQuestion, numbers: Tensors, exchange: HostFunction, values: Tensors
    ) -> list[BackendTensor]:
        def answer(given: Sequence[HostArray]) -> list[HostArray]:
            return [np.asarray(due(given[1:]), np.int32), *given[1:]]

        is_due = _call_on_host(answer, [jax.numpy.zeros([], np.int32), *numbers])[0]
        if not isinstance(is_due, jax.core.Tracer):
            return [*_call_on_host(exchange, values)] if is_due else list(values)
        return list(jax.lax.cond(is_due, partial(_call_on_host, exchange), list, list(values)))

    def reduce(
        self,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        exchange: ReduceArrays,
        settings: GradientSettings,
        name: str,
        samples: BackendTensor | float | None,
    ) -> list[BackendTensor | None]:
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        arrays: list[Any] = [gradients[i] for i in present]
        count, weighted = len(arrays), isinstance(samples, jax.core.Tracer)
        if weighted:  # its value is known when the step runs
            arrays.append(jax.numpy.asarray(samples, "float32"))
        if not any(isinstance(array, jax.core.Tracer) for array in arrays):
            return super().reduce(gradients, variables, exchange, settings, name, samples)
        known = None if samples is None or weighted else float(samples)

        def function(given: Sequence[HostArray]) -> list[HostArray]:
            own: list[HostArray | None] = [None] * len(gradients)
            for index, array in zip(present, given, strict=False):
                own[index] = array
            weight = float(given[count]) if weighted else known
            results = self.reduce_arrays(own, variables, exchange, name, weight, fixed=True)
            return [*(array for array in results if array is not None), *given[count:]]

        nbytes = sum(array.nbytes for array in arrays)
        if nbytes >= _LARGE_BYTES and jax.default_backend() == "cpu":
            keep_large_memory(2 * nbytes, os.environ)  # gradients, and copies that the step makes
        traced = dict(zip(present, _call_on_host(function, arrays), strict=False))
        return [traced.get(index) for index in range(len(gradients))]

    def size_like(self, gradient: BackendTensor, process_set: ProcessSet) -> BackendTensor:
        def size(given: Sequence[HostArray]) -> list[HostArray]:
            return [np.full_like(given[0], process_set.size())]

        return _call_on_host(size, [gradient.reshape(-1)[:1].sum()])[0]

    @collective
    def traced_allreduce(
        self, value: Value, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> BackendTensor | None:
        if not isinstance(value, jax.core.Tracer):
            return None
        return _allreduce(value, op, name, prescale, postscale)

    def is_tracing(self) -> bool:
        return isinstance(jax.numpy.zeros([]), jax.core.Tracer)

    def wait_for_steps(self) -> None:
        jax.effects_barrier()


@collective
def _allreduce(
    value: jax.Array, op: ReduceOp, name: str | None, prescale: float, postscale: float
) -> jax.Array:
    """Reduce a value; its gradient is reduced in the same way."""

    def function(given: Sequence[HostArray]) -> list[HostArray]:
        return collectives.allreduce(given, op, name, prescale, postscale, global_process_set)

    def backward(_: None, upstream: jax.Array) -> tuple[jax.Array]:
        check_has_gradient("allreduce", op)
        own = None if name is None else f"{name}.gradient"
        return (_allreduce(upstream, op, own, prescale, postscale),)

    reduced = jax.custom_vjp(lambda value: _call_on_host(function, [value])[0])
    reduced.defvjp(lambda value: (reduced(value), None), backward)
    return reduced(value)


def _call_on_host(function: HostFunction, values: Tensors) -> list[jax.Array]:
    if not any(isinstance(value, jax.core.Tracer) for value in values):
        return [jax.numpy.asarray(a) for a in function([np.asarray(value) for value in values])]
    # JAX compiles no callback in a step that it divides among devices.
    distribution = keras.distribution.distribution()
    count = 1 if distribution is None else distribution.device_mesh.devices.size
    if count > 1:
        raise UnsupportedError(
            f"keras.distribution divides a step among {count} devices, and such a step cannot "
            "reduce over ranks: leave it out, and start one rank for each device"
        )
    kinds = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    if jax.default_backend() != "cpu":

        def on_host(*given: jax.Array) -> Sequence[HostArray]:
            return function([np.asarray(array) for array in given])

        return list(io_callback(on_host, kinds, *values, ordered=True))

    def in_place(_: object, results: Sequence[Any], ticket: Any, *given: Any) -> None:
        reduced = function([np.asarray(buffer) for buffer in given])
        for result, array in zip(results, [*reduced, np.asarray(ticket)], strict=True):
            np.asarray(result)[...] = array

    # io_callback passes arrays that a thread of JAX's pool has to copy first, while all threads of
    # the pool may be waiting in callbacks. So it only keeps the order of the in-place callbacks.
    ticket = io_callback(lambda: np.int32(0), _TICKET, ordered=True)
    aliases = {1 + number: number for number in range(len(kinds))}
    *results, done = buffer_callback(
        in_place, [*kinds, _TICKET], has_side_effect=True, input_output_aliases=aliases
    )(ticket, *values)
    io_callback(lambda _: None, None, done, ordered=True)
    return list(results)
