"""Gradients of TensorFlow variables, reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.core.arguments import Groups, check_groups, check_predivide, group_indices
from hvdtrain.core.arrays.fused import reduce_fused
from hvdtrain.core.arrays.fused_plan import FusedSettings
from hvdtrain.core.arrays.memory import Array
from hvdtrain.core.process_set import ProcessSet, global_process_set, require_process_set
from hvdtrain.tensorflow.graph.call import call
from hvdtrain.tensorflow.operations.compression import Compression, Compressor
from hvdtrain.tensorflow.operations.ops import grouped_allreduce
from hvdtrain.types import ReduceOp

__all__ = ["GradientSettings", "LocalVariables", "reduce_gradients"]


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are reduced.

    Attributes:
        op: Average or Sum, which are fused, or another reduction.
        process_set: the ranks that take part; others keep their own gradients.
        compression: how gradients are rounded before they are added.
        sparse_as_dense: make tf.IndexedSlices dense, instead of gathering the slices.
        predivide: the average is (1/predivide before, predivide/size after) the sum.
        groups: how many groups are reduced together, or lists of variables.

    Raises:
        TypeError: `process_set` is none.
        ValueError: arguments do not go together.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    process_set: ProcessSet = global_process_set
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: Groups = None

    def __post_init__(self) -> None:
        require_process_set(self.process_set)
        if not isinstance(self.op, ReduceOp):
            raise ValueError(f"op must be a reduction, Average for example, got {self.op!r}")
        check_predivide(self.predivide, self.op)
        check_groups(self.groups, object)


class LocalVariables:
    """Variables whose gradients stay on their rank.

    Args:
        scale: divide their gradients by the number of ranks, as the average does with the others.
    """

    def __init__(self, scale: bool) -> None:
        self._scale = scale
        self._ids: dict[int, Any] = {}

    def add(self, variable: Any) -> None:
        """Keep the gradient of this variable local."""
        self._ids[id(variable)] = variable  # kept, so that no other one gets its id

    def __contains__(self, variable: object) -> bool:
        return id(variable) in self._ids

    def scaled(self, gradient: Any, size: int) -> Any:
        """Return the gradient of a local variable as it is used."""
        if gradient is None or not self._scale:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(size, gradient.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)


def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    settings: GradientSettings,
    local: LocalVariables,
    name: str,
) -> list[Any]:
    """Return the gradients of all ranks; None stays None (collective).

    Args:
        gradients: of the variables, on all ranks of equal number, shapes and types.
        variables: what they are of.
        settings: equal on all ranks.
        local: variables whose gradients are not reduced.
        name: of the operation.
    """
    process_set = settings.process_set
    if not process_set.included() or process_set.size() == 1:
        return list(gradients)
    results = list(gradients)
    for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if variable in local:
            results[index] = local.scaled(gradient, process_set.size() or 1)
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
            slices, op=settings.op, process_set=process_set, name=f"{name}_slices"
        )
        for index, reduced in zip(sparse, gathered, strict=True):
            results[index] = reduced
    return results


def _reduce_dense(
    gradients: Sequence[Any], variables: Sequence[Any], settings: GradientSettings, name: str
) -> list[Any]:
    pairs = [settings.compression.compress(tf.convert_to_tensor(g)) for g in gradients]
    inputs = [tensor for tensor, _ in pairs]
    if settings.op in (ReduceOp.AVERAGE, ReduceOp.SUM):
        fused = FusedSettings(
            settings.op,
            settings.process_set,
            settings.predivide,
            group_indices(settings.groups, variables),
        )
        reduced = _reduce_fused(inputs, fused, name)
    else:
        reduced = grouped_allreduce(
            inputs, op=settings.op, process_set=settings.process_set, name=name
        )
    return [
        settings.compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def _reduce_fused(tensors: Sequence[Any], settings: FusedSettings, name: str) -> list[Any]:
    def function(arrays: Sequence[Array], key: str | None) -> list[Array]:
        return reduce_fused(arrays, key or name, settings)

    @tf.custom_gradient
    def operation(*inputs: Any) -> Any:
        def gradient(*upstream: Any) -> Any:  # of a penalty on gradients, for example
            reduced = _reduce_fused([tf.convert_to_tensor(u) for u in upstream], settings, name)
            return reduced if len(reduced) > 1 else reduced[0]

        dtypes, shapes = [t.dtype for t in inputs], [t.shape for t in inputs]
        return call(function, inputs, dtypes, shapes, name), gradient

    outputs: list[Any] = operation(*tensors)
    return outputs
