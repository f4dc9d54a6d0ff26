"""Gradients of Keras on TensorFlow: tensors of a graph or eager ones, dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.core.arrays.memory import Array
from hvdtrain.keras.backends.reduction import Reduction
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.tensorflow.graph.call import call
from hvdtrain.tensorflow.operations import ops
from hvdtrain.tensorflow.operations.compression import Compression
from hvdtrain.types import ReduceOp

__all__ = ["allreduce", "is_symbolic", "reduce", "settle", "trace_again", "unconverted"]

_COMPRESSIONS = {None: Compression.none, "float16": Compression.fp16, "bfloat16": Compression.bf16}


def reduce(
    gradients: Sequence[Any], variables: Sequence[Any], reduction: Reduction, samples: Any
) -> list[Any]:
    """Return the gradients of all ranks (collective)."""
    as_dense = reduction.settings.sparse_as_dense or reduction.uneven
    results = list(gradients)
    sparse = [
        i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices) and not as_dense
    ]
    dense = [i for i in range(len(results)) if i not in sparse]
    compression = _COMPRESSIONS[reduction.settings.compression.dtype]
    pairs = [compression.compress(tf.convert_to_tensor(results[i])) for i in dense]
    own, owners = [tensor for tensor, _ in pairs], [variables[i] for i in dense]
    weight = None if samples is None else tf.cast(samples, tf.float64)
    if sparse and weight is not None:
        own, owners = [*own, 1 / weight], [*owners, weight]  # to know the average of samples
    if own:
        own = _reduce_dense(own, owners, reduction, weight)
    for index, gradient, (_, ctx) in zip(dense, own, pairs, strict=False):
        results[index] = compression.decompress(gradient, ctx)
    if sparse:
        factor = None if weight is None else weight * own[-1]
        gathered = _reduce_sparse([results[i] for i in sparse], reduction, factor)
        for index, gradient in zip(sparse, gathered, strict=True):
            results[index] = gradient
    return results


def _reduce_dense(
    tensors: Sequence[Any], owners: Sequence[Any], reduction: Reduction, weight: Any
) -> list[Any]:
    weights = [] if weight is None else [weight]

    def function(arrays: Sequence[Array], key: str | None) -> list[Array]:
        own, given = arrays[: len(tensors)], arrays[len(tensors) :]
        samples = float(given[0]) if given else None
        return reduction.reduce_arrays(own, owners, samples, key)

    dtypes, shapes = [t.dtype for t in tensors], [t.shape for t in tensors]
    return call(function, [*tensors, *weights], dtypes, shapes, reduction.name)


def _reduce_sparse(slices: Sequence[Any], reduction: Reduction, factor: Any) -> list[Any]:
    settings = reduction.settings
    if factor is not None:
        slices = [
            tf.IndexedSlices(
                each.values * tf.cast(factor, each.dtype), each.indices, each.dense_shape
            )
            for each in slices
        ]
    gathered: list[Any] = ops.grouped_allreduce(
        slices, op=settings.op, process_set=settings.process_set, name=f"{reduction.name}_slices"
    )
    return gathered


def is_symbolic(value: Any) -> bool:
    """Return whether a value is one of a function that is being traced."""
    return bool(tf.is_symbolic_tensor(value))


def allreduce(value: Any, op: ReduceOp, name: str | None, prescale: float, postscale: float) -> Any:
    """Return the reduction of a tensor of a graph (collective when it runs)."""
    return ops.allreduce(
        value, op=op, name=name, prescale_factor=prescale, postscale_factor=postscale
    )


def trace_again(model: Any) -> None:
    """Have a model traced anew, since tf.IndexedSlices may have to be made dense (local)."""
    model.make_train_function(force=True)


def settle() -> None:
    """Return: a step ends before Python goes on (local)."""
