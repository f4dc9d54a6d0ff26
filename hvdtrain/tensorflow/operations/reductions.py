"""Horovod's reductions of TensorFlow tensors; see ops about arguments, names and errors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.core.arguments import choose_op
from hvdtrain.core.compression import Compressor
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.graph import TensorLike, do_not_convert
from hvdtrain.tensorflow.operations import differentiable
from hvdtrain.tensorflow.operations.differentiable import OperationName, Reduction, size_as
from hvdtrain.types import ReduceOp


@do_not_convert
@collective
def allreduce(
    tensor: TensorLike | tf.IndexedSlices,
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
) -> tf.Tensor | tf.IndexedSlices:
    """Return postscale * op over ranks of (prescale * tensor_r).

    Args:
        tensor: tensor with equal shape and dtype on all ranks; or tf.IndexedSlices, whose slices
            are gathered, with Sum or Average and without factors.
        average: deprecated; True is op=Average, False is op=Sum.
        device_dense: ignored.
        device_sparse: ignored.
        compression: compressor, which rounds the tensor before the reduction.
        op: Average (the default; truncated towards zero for integers), Sum, Min, Max, Product or
            Adasum.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        name: operation name.
        process_set: ranks that take part.
        ignore_name_scope: leave the name scope out of the name.

    Returns:
        The result, with the shape and dtype of `tensor`.

    Raises:
        NotImplementedError: tf.IndexedSlices with another op or with factors.
    """
    op = choose_op(op, average)
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce([tensor], compression, reduction, OperationName(name, ignore_name_scope))[0]


@do_not_convert
@collective
def grouped_allreduce(
    tensors: Sequence[TensorLike | tf.IndexedSlices],
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
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce several tensors as one operation; see `allreduce`.

    Args:
        tensors: tensors with equal shapes and dtypes on all ranks, or tf.IndexedSlices; the other
            arguments are those of `allreduce`.

    Returns:
        The results, with the shapes and dtypes of `tensors`.

    Raises:
        NotImplementedError: tf.IndexedSlices with another op or with factors.
    """
    if not len(tensors):
        return list(tensors)
    op = choose_op(op, average)
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce(tensors, compression, reduction, OperationName(name, ignore_name_scope))


@collective
def _reduce(
    tensors: Sequence[TensorLike | tf.IndexedSlices],
    compression: type[Compressor],
    reduction: Reduction,
    name: OperationName,
) -> list[tf.Tensor | tf.IndexedSlices]:
    results: dict[int, tf.Tensor | tf.IndexedSlices] = {}
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    if sparse:
        gathered = _gather_slices([tensors[i] for i in sparse], reduction, name)
        results |= zip(sparse, gathered, strict=True)
    dense = [i for i in range(len(tensors)) if i not in results]
    if dense:
        pairs = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
        reduced = differentiable.allreduce([tensor for tensor, _ in pairs], reduction, name)
        for i, tensor, (_, ctx) in zip(dense, reduced, pairs, strict=True):
            results[i] = compression.decompress(tensor, ctx)
    return [results[i] for i in range(len(tensors))]


@collective
def _gather_slices(
    slices: Sequence[tf.IndexedSlices], reduction: Reduction, name: OperationName
) -> list[tf.IndexedSlices]:
    if reduction.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(
            f"tf.IndexedSlices are reduced by Average or Sum, got {reduction.op.value}: make them "
            "dense with tf.convert_to_tensor or sparse_as_dense=True"
        )
    if (reduction.prescale, reduction.postscale) != (1.0, 1.0):
        raise NotImplementedError("factors cannot be applied to tf.IndexedSlices: make them dense")
    parts = [part for each in slices for part in (each.values, each.indices)]
    own = name.name and f"{name.name}.slices"
    full = OperationName(own, name.ignore_name_scope)
    gathered = differentiable.allgather(parts, reduction.process_set, full, ReduceOp.SUM)
    summed, all_indices = gathered[::2], gathered[1::2]
    if reduction.op is ReduceOp.AVERAGE:
        summed = [values / size_as(values.dtype, reduction.process_set) for values in summed]
    return [
        tf.IndexedSlices(values, indices, each.dense_shape)
        for each, values, indices in zip(slices, summed, all_indices, strict=True)
    ]


@do_not_convert
@collective
def reducescatter(
    tensor: TensorLike,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor and return this rank's rows of the result; see `allreduce`.

    Rows are divided as evenly as possible; lower ranks get more.

    Args:
        tensor: tensor [rows, ...] with equal shape and dtype on all ranks.
        device_dense: ignored.
        compression: compressor, which rounds the tensor before the reduction.
        op: Average, Sum, Min, Max or Product.
        name: operation name.
        process_set: ranks that take part.
        ignore_name_scope: leave the name scope out of the name.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
    """
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce_and_scatter(
        [tensor], compression, reduction, OperationName(name, ignore_name_scope)
    )[0]


@do_not_convert
@collective
def grouped_reducescatter(
    tensors: Sequence[TensorLike],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduce several tensors as one operation and return this rank's rows; see `reducescatter`.

    Args:
        tensors: tensors [rows, ...] with equal shapes and dtypes on all ranks; the other arguments
            are those of `reducescatter`.
    """
    if not len(tensors):
        return list(tensors)
    reduction = Reduction(op, process_set, float(prescale_factor), float(postscale_factor))
    return _reduce_and_scatter(tensors, compression, reduction, OperationName())


@collective
def _reduce_and_scatter(
    tensors: Sequence[TensorLike],
    compression: type[Compressor],
    reduction: Reduction,
    name: OperationName,
) -> list[tf.Tensor]:
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    reduced = differentiable.reducescatter([tensor for tensor, _ in pairs], reduction, name)
    return [
        compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)
    ]
