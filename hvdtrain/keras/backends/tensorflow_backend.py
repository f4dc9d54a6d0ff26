"""Keras on TensorFlow, whose gradients are eager or of a graph, dense or sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.layouts import Layout
from hvdtrain.core.gradients.weight_check import WeightSums
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.keras.backends.reduction import F, GradientReduction, ReductionBackend
from hvdtrain.keras.backends.types import BackendTensor, KerasModel, KerasVariable, Value
from hvdtrain.tensorflow import operations
from hvdtrain.tensorflow.allocator import find_library
from hvdtrain.tensorflow.differentiable import size_as
from hvdtrain.tensorflow.gradients import LayoutReduction, as_dense
from hvdtrain.tensorflow.graph import call_on_arrays, do_not_convert, weight_sums
from hvdtrain.types import ReduceOp

_FLAG = tf.TensorSpec([], tf.bool)


class TensorFlowBackend(ReductionBackend):
    """TensorFlow; see `ReductionBackend`."""

    allocator = staticmethod(find_library)

    def reduce(
        self,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        reduction: GradientReduction,
        samples: BackendTensor | float | None,
    ) -> list[BackendTensor | None]:
        settings = reduction.settings

        def reduce(
            arrays: Sequence[HostArray], layout: Layout, key: str | None, weight: float | None
        ) -> tuple[list[HostArray], float]:
            return reduction.reduce_layout(arrays, variables, layout, weight, key)

        def gather(slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
            process_set, name = settings.process_set, f"{reduction.name}_slices"
            return operations.grouped_allreduce(
                slices, op=settings.total, process_set=process_set, name=name
            )

        weight = None if samples is None else tf.cast(samples, tf.float64)
        return LayoutReduction(variables, reduction.name, reduce, gather, weight)(gradients)

    def as_dense(self, gradients: Sequence[BackendTensor | None]) -> list[BackendTensor | None]:
        return as_dense(gradients)

    def exchange_if(
        self,
        due: Callable[[list[HostArray]], bool],
        numbers: Sequence[BackendTensor],
        exchange: Callable[[list[HostArray]], list[HostArray]],
        weights: Sequence[BackendTensor],
    ) -> list[BackendTensor]:
        def answer(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
            return [np.asarray(due(list(arrays)))]

        def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
            return exchange(list(arrays))

        def exchanged() -> tuple[tf.Tensor, ...]:
            return tuple(call_on_arrays(function, tensors, tensors, "exchange_of_weights"))

        tensors = [tf.convert_to_tensor(each) for each in weights]
        (is_due,) = call_on_arrays(answer, numbers, [_FLAG], "exchange_is_due")
        results = tf.cond(is_due, exchanged, lambda: tuple(map(tf.identity, tensors)))
        return list(results)

    def map_arrays(
        self,
        function: Callable[[Sequence[HostArray]], Sequence[HostArray]],
        inputs: Sequence[BackendTensor],
        results: Sequence[BackendTensor],
        name: str,
    ) -> list[BackendTensor]:
        def call(arrays: Sequence[HostArray], key: str | None) -> Sequence[HostArray]:
            return function(arrays)

        tensors = [tf.convert_to_tensor(each) for each in inputs]  # some are variables
        return call_on_arrays(call, tensors, results, name)

    def size_like(self, gradient: BackendTensor, process_set: ProcessSet) -> tf.Tensor:
        return size_as(gradient.dtype, process_set)

    @collective
    def traced_allreduce(
        self, value: Value, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> tf.Tensor | None:
        if not tf.is_symbolic_tensor(value):
            return None
        reduced: tf.Tensor = operations.allreduce(
            value, op=op, name=name, prescale_factor=prescale, postscale_factor=postscale
        )
        return reduced

    def weight_sums(self, variables: Sequence[KerasVariable]) -> WeightSums | None:
        return weight_sums(variables)

    def is_tracing(self) -> bool:
        inside: bool = tf.inside_function()
        return inside

    def retrace(self, model: KerasModel) -> None:
        model.make_train_function(force=True)

    def outside_traces(self) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = tf.init_scope()
        return scope

    def do_not_compile(self, function: F) -> F:
        return do_not_convert(function)
