"""Keras on TensorFlow, whose gradients are eager or of a graph, dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.keras.backends.backend import Backend, HostFunction, HostQuestion, Tensors
from hvdtrain.keras.backends.types import BackendTensor, Value
from hvdtrain.tensorflow import operations
from hvdtrain.tensorflow.allocator import find_library
from hvdtrain.tensorflow.differentiable import size_as
from hvdtrain.tensorflow.gradients import as_dense, reduce_layouts
from hvdtrain.tensorflow.graph import call_on_arrays, do_not_convert, weight_sums
from hvdtrain.tensorflow.keras_steps import faster_steps
from hvdtrain.types import ReduceOp

_FLAG = tf.TensorSpec([], tf.bool)


class TensorFlowBackend(Backend):
    allocator = staticmethod(find_library)
    reduce = staticmethod(reduce_layouts)
    as_dense = staticmethod(as_dense)
    size_like = staticmethod(lambda gradient, process_set: size_as(gradient.dtype, process_set))
    weight_sums = staticmethod(weight_sums)
    faster_steps = staticmethod(faster_steps)
    do_not_compile = staticmethod(do_not_convert)
    is_tracing = staticmethod(tf.inside_function)
    outside_traces = staticmethod(tf.init_scope)

    def map_arrays(
        self, function: HostFunction, inputs: Tensors, results: Tensors, name: str
    ) -> list[BackendTensor]:
        def call(arrays: Sequence[HostArray], key: str | None) -> Sequence[HostArray]:
            return function(arrays)

        tensors = [tf.convert_to_tensor(each) for each in inputs]  # some are variables
        return call_on_arrays(call, tensors, results, name)

    def exchange_if(
        self, due: HostQuestion, numbers: Tensors, exchange: HostFunction, values: Tensors
    ) -> list[BackendTensor]:
        def answer(arrays: Sequence[HostArray]) -> list[HostArray]:
            return [np.asarray(due(arrays))]

        def exchanged() -> tuple[BackendTensor, ...]:
            return tuple(self.map_arrays(exchange, tensors, tensors, "exchange_of_weights"))

        tensors = [tf.convert_to_tensor(each) for each in values]
        (is_due,) = self.map_arrays(answer, numbers, [_FLAG], "exchange_is_due")
        return list(tf.cond(is_due, exchanged, lambda: tuple(map(tf.identity, tensors))))

    @collective
    def traced_allreduce(
        self, value: Value, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> tf.Tensor | None:
        if not tf.is_symbolic_tensor(value):
            return None
        return operations.allreduce(
            value, op=op, name=name, prescale_factor=prescale, postscale_factor=postscale
        )

    def after(self, tensors: Sequence[BackendTensor | None]) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = tf.control_dependencies(
            [tensor for tensor in tensors if tensor is not None]
        )
        return context

    def retrace(self, model: keras.Model) -> None:
        model.make_train_function(force=True)
