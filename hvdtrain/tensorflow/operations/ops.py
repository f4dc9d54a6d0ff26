"""Operations on TensorFlow tensors, as Horovod has them, in eager mode and in graphs.

All are collective over the process set, return new tensors, and let gradients flow through them.
They take tensors, variables and what tf.convert_to_tensor takes, on any device: bytes pass
through host memory. A `name` shows in messages and is how ranks find one another's operations;
without one an operation is named after its tensor in a graph, and numbered in eager mode. What
Horovod's `device_dense` and `device_sparse` said makes no difference.

Errors of all of them, in eager mode: MismatchError, which is tf.errors.FailedPreconditionError,
too, where name, shape, type, reduction, root or factors differ between ranks; ValueError, which is
tf.errors.InvalidArgumentError, too, for arguments that make no sense; UnsupportedError where the
engine does not take the type. In a graph TensorFlow raises UnknownError or InvalidArgumentError
with the same text when it runs, and UnsupportedError is raised when XLA is to compile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core import operations
from hvdtrain.core.arguments import choose_op
from hvdtrain.core.arrays.memory import Array
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.tensorflow.graph.call import call
from hvdtrain.tensorflow.operations import differentiable
from hvdtrain.tensorflow.operations.compression import Compression, Compressor
from hvdtrain.tensorflow.operations.differentiable import Naming, Reduction
from hvdtrain.types import ReduceOp

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return postscale * op over ranks of (prescale * tensor_r).

    Args:
        tensor: of equal shape and type on all ranks; of tf.IndexedSlices the slices of all ranks
            are gathered, with Sum or Average and without factors.
        average: deprecated; True is op=Average, False op=Sum.
        device_dense: makes no difference.
        device_sparse: makes no difference.
        compression: how the tensor is rounded before.
        op: Average (the default; for integers truncated towards zero), Sum, Min, Max, Product
            or Adasum.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.
        name: of the operation.
        process_set: the ranks that take part.
        ignore_name_scope: leave the name scope out of the name.
    """
    op = choose_op(op, average)
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce([tensor], compression, reduction, Naming(name, ignore_name_scope))[0]


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the reductions of several tensors as one operation; see `allreduce`."""
    if not len(tensors):
        return list(tensors)
    op = choose_op(op, average)
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce(tensors, compression, reduction, Naming(name, ignore_name_scope))


def _reduce(
    tensors: Sequence[Any],
    compression: type[Compressor],
    reduction: Reduction,
    naming: Naming,
) -> list[Any]:
    results: dict[int, Any] = {}
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    if sparse:
        gathered = _gather_slices([tensors[i] for i in sparse], reduction, naming)
        results |= zip(sparse, gathered, strict=True)
    dense = [i for i in range(len(tensors)) if i not in results]
    if dense:
        pairs = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
        reduced = differentiable.allreduce([tensor for tensor, _ in pairs], reduction, naming)
        for i, tensor, (_, ctx) in zip(dense, reduced, pairs, strict=True):
            results[i] = compression.decompress(tensor, ctx)
    return [results[i] for i in range(len(tensors))]


def _gather_slices(
    slices: Sequence[Any], reduction: Reduction, naming: Naming
) -> list[tf.IndexedSlices]:
    if reduction.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(
            f"tf.IndexedSlices are reduced by Average or Sum, got {reduction.op.value}: make them "
            "dense with tf.convert_to_tensor or sparse_as_dense=True"
        )
    if (reduction.prescale, reduction.postscale) != (1.0, 1.0):
        raise NotImplementedError("factors do not go with tf.IndexedSlices: make them dense")
    parts = [part for each in slices for part in (each.values, each.indices)]
    name = naming.name and f"{naming.name}.slices"
    gathered = differentiable.allgather(
        parts, reduction.process_set, Naming(name, naming.ignore_name_scope)
    )
    summed, places = gathered[::2], gathered[1::2]
    if reduction.op is ReduceOp.AVERAGE:
        size = reduction.process_set.size()
        summed = [values / tf.cast(size, values.dtype) for values in summed]
    return [
        tf.IndexedSlices(values, indices, each.dense_shape)
        for each, values, indices in zip(slices, summed, places, strict=True)
    ]


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all ranks, concatenated along the first dimension by rank.

    Args:
        tensor: only the first dimension may differ between ranks; a 0-d tensor counts as one
            element.
        name: of the operation.
        ignore_name_scope: leave the name scope out of the name.
        process_set: the ranks that take part.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the concatenations of several tensors as one operation; see `allgather`."""
    if not len(tensors):
        raise ValueError("a group needs at least one tensor")
    inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return differentiable.allgather(inputs, process_set, Naming(name, ignore_name_scope))


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank `root_rank`'s tensor on every rank.

    Args:
        tensor: of equal shape and type on all ranks.
        root_rank: a rank of the world, also with a process set.
        name: of the operation.
        ignore_name_scope: leave the name scope out of the name.
        process_set: the ranks that take part.
    """
    given = tf.convert_to_tensor(tensor)
    return differentiable.broadcast(
        given, int(root_rank), process_set, Naming(name, ignore_name_scope)
    )


@unconverted
def alltoall(
    tensor: Any,
    splits: Any | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send part r of the first dimension to rank r; return what was received, by rank.

    Args:
        tensor: only the first dimension may differ between ranks.
        splits: [size] whole numbers, how many rows go to each rank; without them all get the
            same.
        name: of the operation.
        ignore_name_scope: leave the name scope out of the name.
        process_set: the ranks that take part.

    Returns:
        The rows received; with `splits` also how many came from each rank (int32).
    """
    given = tf.convert_to_tensor(tensor)
    counts = None if splits is None else tf.convert_to_tensor(splits)
    naming = Naming(name, ignore_name_scope)
    rows, received = differentiable.alltoall(given, counts, process_set, naming)
    return rows if splits is None else (rows, received)


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's part of a reduction, cut along the first dimension.

    Parts are as even as can be; lower ranks get the larger ones. See `allreduce`.
    """
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce_and_scatter([tensor], compression, reduction, Naming(name, ignore_name_scope))[0]


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's parts of several reductions as one operation; see `reducescatter`."""
    if not len(tensors):
        return list(tensors)
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce_and_scatter(tensors, compression, reduction, Naming())


def _reduce_and_scatter(
    tensors: Sequence[Any],
    compression: type[Compressor],
    reduction: Reduction,
    naming: Naming,
) -> list[Any]:
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    reduced = differentiable.reducescatter([tensor for tensor, _ in pairs], reduction, naming)
    return [
        compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    operations.barrier(channel_of(process_set))


@unconverted
def join() -> Any:
    """Take part in the others' reductions with zeros until all ranks have joined.

    Returns:
        The rank that joined last (int32).
    """

    def function(arrays: Sequence[Array], name: str | None) -> list[Array]:
        return [np.array(operations.join(), np.int32)]

    return call(function, [], [tf.int32], [[]], "join")[0]
