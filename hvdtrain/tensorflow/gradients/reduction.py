"""The reduction of gradients of TensorFlow variables over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.core.arguments import Groups, choose_exchange
from hvdtrain.core.arrays.fused import reduce_fused
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.process_set import ProcessSet, stays_alone
from hvdtrain.tensorflow.allocator.registration import find_library
from hvdtrain.tensorflow.graph.array_calls import call_on_arrays
from hvdtrain.tensorflow.operations.compression import (
    Compression,
    Compressor,
    compression_name,
)
from hvdtrain.tensorflow.operations.reductions import grouped_allreduce
from hvdtrain.tensorflow.operations.sizes import size_as
from hvdtrain.tensorflow.tensors.types import Gradient, Variable
from hvdtrain.types import ReduceOp

__all__ = ["LocalVariables", "VariableSettings", "reduce_gradients"]

_FUSED = (ReduceOp.AVERAGE, ReduceOp.SUM)


@dataclass(frozen=True)
class VariableSettings(GradientSettings):
    """How gradients of TensorFlow variables are reduced.

    Attributes:
        op: Average or Sum, which are fused, or another reduction.
        compressor: compressor, which changes gradients before the reduction.
    """

    compressor: type[Compressor] = Compression.none

    @classmethod
    def of(
        cls,
        op: ReduceOp,
        process_set: ProcessSet,
        compression: type[Compressor],
        sparse_as_dense: bool,
        predivide: float,
        groups: Groups,
    ) -> VariableSettings:
        """Return the settings for arguments of the user.

        Args:
            op, process_set, sparse_as_dense, predivide, groups: see GradientSettings.
            compression: compressor; fp16 and bf16 of sums and averages are exchanges.
        """
        kind = compression_name(compression) if op in _FUSED else "own"
        exchange = choose_exchange(None, op, predivide, kind) if op in _FUSED else None
        compressor = compression if kind == "own" else Compression.none
        return cls(
            *(op, process_set, predivide, groups, sparse_as_dense, exchange),
            find_library,
            compressor,
        )


class LocalVariables:
    """Variables whose gradients are not reduced.

    Args:
        scale: divide their gradients by the number of ranks, as the average divides the others.
    """

    def __init__(self, scale: bool) -> None:
        self._scale = scale
        self._by_id: dict[int, Variable] = {}

    def add(self, variable: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._by_id[id(variable)] = variable  # kept, so that no other object gets its id

    def __contains__(self, variable: object) -> bool:
        return id(variable) in self._by_id

    def scaled(self, gradient: Gradient, process_set: ProcessSet) -> Gradient:
        """Return the gradient of a local variable, scaled if that was asked for.

        Args:
            gradient: gradient of any shape, of a floating point dtype.
            process_set: ranks that take part.
        """
        if gradient is None or not self._scale:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / size_as(gradient.dtype, process_set)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / size_as(gradient.dtype, process_set)


def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    settings: VariableSettings,
    local: LocalVariables,
    name: str,
) -> list[Gradient]:
    """Reduce gradients over the ranks; None stays None (collective).

    Args:
        gradients: gradients with equal number, shapes and dtypes on all ranks.
        variables: the variable of each gradient.
        settings: settings of the reduction, equal on all ranks.
        local: variables whose gradients are not reduced.
        name: operation name.

    Returns:
        The reduced gradients, with the shapes and dtypes of `gradients`.
    """
    process_set = settings.process_set
    if not process_set.included() or stays_alone(process_set):
        return list(gradients)
    results = list(gradients)
    for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if variable in local:
            results[index] = local.scaled(gradient, process_set)
        elif settings.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            results[index] = tf.convert_to_tensor(gradient)
    shared = [i for i, v in enumerate(variables) if v not in local and results[i] is not None]
    sparse = [i for i in shared if isinstance(results[i], tf.IndexedSlices)]
    dense = [i for i in shared if i not in sparse]
    if dense:
        own, theirs = [results[i] for i in dense], [variables[i] for i in dense]
        for index, reduced in zip(dense, _reduce_dense(own, theirs, settings, name), strict=True):
            results[index] = reduced
    if sparse:
        slices = [results[i] for i in sparse]
        gathered = grouped_allreduce(
            slices, op=settings.total, process_set=process_set, name=f"{name}_slices"
        )
        for index, reduced in zip(sparse, gathered, strict=True):
            results[index] = reduced
    return results


def _reduce_dense(
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    settings: VariableSettings,
    name: str,
) -> list[tf.Tensor]:
    pairs = [settings.compressor.compress(tf.convert_to_tensor(g)) for g in gradients]
    inputs = [tensor for tensor, _ in pairs]
    if settings.op in _FUSED:
        reduced = _reduce_fused(inputs, variables, settings, name)
    else:
        reduced = grouped_allreduce(
            inputs, op=settings.op, process_set=settings.process_set, name=name
        )
    return [
        settings.compressor.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def _reduce_fused(
    tensors: Sequence[tf.Tensor],
    variables: Sequence[Variable],
    settings: GradientSettings,
    name: str,
) -> list[tf.Tensor]:
    """Reduce dense gradients as one operation, which can be differentiated (collective)."""

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return reduce_fused(arrays, variables, key or name, settings)

    def operation(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: tf.Tensor) -> Any:  # of a penalty on gradients, for example
            given = [tf.convert_to_tensor(u) for u in upstream]
            reduced = _reduce_fused(given, variables, settings, name)
            return reduced if len(reduced) > 1 else reduced[0]

        dtypes, shapes = [t.dtype for t in inputs], [t.shape for t in inputs]
        return call_on_arrays(function, inputs, dtypes, shapes, name), gradient

    outputs: list[tf.Tensor] = tf.custom_gradient(operation)(*tensors)
    return outputs
