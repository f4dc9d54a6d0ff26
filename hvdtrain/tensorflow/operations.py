"""Horovod's operations on TensorFlow tensors, in eager mode and in graphs.

All are collective over the process set, return new tensors, and let gradients flow through them.
They take tensors, variables and whatever tf.convert_to_tensor takes, of any shape and dtype and on
any device: the data pass through host memory. Messages contain the `name`, by which ranks match
their operations; without one an operation is named after its tensor in a graph, and numbered in
eager mode. Horovod's `device_dense` and `device_sparse` are ignored.

Errors of all operations in eager mode: MismatchError, which is also
tf.errors.FailedPreconditionError, where name, shape, dtype, reduction, root or factors differ
between ranks; ValueError, which is also tf.errors.InvalidArgumentError, for invalid arguments;
UnsupportedError where the engine does not support the dtype. In a graph TensorFlow raises
UnknownError or InvalidArgumentError with the same text when it runs, and UnsupportedError is raised
when XLA is to compile it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context, horovod_api, operations
from hvdtrain.core.compression import Compressor
from hvdtrain.core.operations import choose_op
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.tensorflow import differentiable
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.differentiable import Options, size_as
from hvdtrain.tensorflow.graph import NUMBER, TensorLike, call_on_arrays, do_not_convert
from hvdtrain.types import ReduceOp


@do_not_convert
@collective
def allgather(
    tensor: TensorLike,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the rows of all ranks, ordered by rank.

    Args:
        tensor: tensor [rows, ...], of which only `rows` may differ between ranks; a 0-d tensor
            counts as one row.
        name: operation name.
        ignore_name_scope: leave the name scope out of the name.
        process_set: ranks that take part.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@do_not_convert
@collective
def grouped_allgather(
    tensors: Sequence[TensorLike],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors as one operation; see `allgather`.

    Args:
        tensors: tensors [rows, ...], of which only `rows` may differ between ranks.
        name: operation name.
        ignore_name_scope: leave the name scope out of the name.
        process_set: ranks that take part.

    Raises:
        ValueError: there are no tensors.
    """
    if not len(tensors):
        raise ValueError("a group needs at least one tensor")
    inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return differentiable.allgather(inputs, Options(process_set, name, ignore_name_scope))


@do_not_convert
@collective
def broadcast(
    tensor: TensorLike,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensor of `root_rank` on every rank.

    Args:
        tensor: tensor with equal shape and dtype on all ranks.
        root_rank: world rank that sends its tensor, also with a process set.
        name: operation name.
        ignore_name_scope: leave the name scope out of the name.
        process_set: ranks that take part.
    """
    how = Options(process_set, name, ignore_name_scope)
    return differentiable.broadcast(tf.convert_to_tensor(tensor), int(root_rank), how)


@do_not_convert
@collective
def alltoall(
    tensor: TensorLike,
    splits: TensorLike | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank and return the rows received.

    Args:
        tensor: tensor [rows, ...], of which only `rows` may differ between ranks.
        splits: number of rows for each rank, any integer type [size]; None for equal numbers.
        name: operation name.
        ignore_name_scope: leave the name scope out of the name.
        process_set: ranks that take part.

    Returns:
        The rows received, ordered by rank; with `splits` also the number received from each rank,
        int32 [size].
    """
    given = tf.convert_to_tensor(tensor)
    counts = None if splits is None else tf.convert_to_tensor(splits)
    how = Options(process_set, name, ignore_name_scope)
    rows, received = differentiable.alltoall(given, counts, how)
    return rows if splits is None else (rows, received)


@collective
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this function."""
    operations.barrier(channel_of(process_set))


@do_not_convert
def join() -> tf.Tensor:
    """Contribute zeros to the reductions of other ranks until all ranks have joined.

    Returns:
        The rank that joined last, int32 []: one that missed none of the operations before, if there
        is one.
    """

    def function(arrays: Sequence[HostArray], name: str | None) -> list[HostArray]:
        return [np.array(operations.join(), np.int32)]

    return call_on_arrays(function, [], [NUMBER], "join")[0]


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
    op, factors = choose_op(op, average), (float(prescale_factor), float(postscale_factor))
    how = Options(process_set, name, ignore_name_scope, op, *factors)
    return _reduce([tensor], compression, how)[0]


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
    op, factors = choose_op(op, average), (float(prescale_factor), float(postscale_factor))
    return _reduce(
        tensors, compression, Options(process_set, name, ignore_name_scope, op, *factors)
    )


@collective
def _reduce(
    tensors: Sequence[TensorLike | tf.IndexedSlices], compression: type[Compressor], how: Options
) -> list[tf.Tensor | tf.IndexedSlices]:
    results: dict[int, tf.Tensor | tf.IndexedSlices] = {}
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    if sparse:
        gathered = _gather_slices([tensors[i] for i in sparse], how)
        results |= zip(sparse, gathered, strict=True)
    dense = [i for i in range(len(tensors)) if i not in results]
    if dense:
        reduce = differentiable.allreduce
        reduced = _compressed(reduce, [tensors[i] for i in dense], compression, how)
        results |= zip(dense, reduced, strict=True)
    return [results[i] for i in range(len(tensors))]


@collective
def _compressed(
    reduce: Callable[[Sequence[tf.Tensor], Options], list[tf.Tensor]],
    tensors: Sequence[TensorLike],
    compression: type[Compressor],
    how: Options,
) -> list[tf.Tensor]:
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    reduced = reduce([tensor for tensor, _ in pairs], how)
    return [
        compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)
    ]


@collective
def _gather_slices(slices: Sequence[tf.IndexedSlices], how: Options) -> list[tf.IndexedSlices]:
    if how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError(
            f"tf.IndexedSlices are reduced by Average or Sum, got {how.op.value}: make them "
            "dense with tf.convert_to_tensor or sparse_as_dense=True"
        )
    if (how.prescale, how.postscale) != (1.0, 1.0):
        raise NotImplementedError("factors cannot be applied to tf.IndexedSlices: make them dense")
    parts = [part for each in slices for part in (each.values, each.indices)]
    own = how.name and f"{how.name}.slices"
    gathered = differentiable.allgather(parts, replace(how, name=own, op=ReduceOp.SUM))
    summed, all_indices = gathered[::2], gathered[1::2]
    if how.op is ReduceOp.AVERAGE:
        summed = [values / size_as(values.dtype, how.process_set) for values in summed]
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
    factors = float(prescale_factor), float(postscale_factor)
    how = Options(process_set, name, ignore_name_scope, op, *factors)
    return _compressed(differentiable.reducescatter, [tensor], compression, how)[0]


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
    factors = float(prescale_factor), float(postscale_factor)
    how = Options(process_set, None, False, op, *factors)
    return _compressed(differentiable.reducescatter, tensors, compression, how)


# Horovod's results in place of 0 or 1.
_NOT_INITIALIZED = -1
_UNKNOWN_SET = -2


@do_not_convert
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank of this process, int32 []."""
    return _number_op(horovod_api.rank, name or "rank")


@do_not_convert
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the local rank of this process on its node, int32 []."""
    return _number_op(horovod_api.local_rank, name or "local_rank")


@do_not_convert
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this rank's node, int32 []."""
    return _number_op(horovod_api.local_size, name or "local_size")


@do_not_convert
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks in a process set, int32 [].

    Args:
        process_set_id: id of the process set; 0 is all ranks.
        name: name of the node.

    Raises:
        ValueError: there is no such process set (when it is evaluated).
    """

    def size() -> int:
        here = context.current()
        if process_set_id == 0:
            return here.topology.size
        if process_set_id not in here.process_sets:
            raise ValueError(f"there is no process set with id {process_set_id}")
        return len(here.process_sets[process_set_id])

    return _number_op(size, name or "size")


@do_not_convert
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank is in a process set, else 0, int32 [].

    Args:
        process_set_id: id of the process set; 0 is all ranks.
        name: name of the node.

    Returns:
        1 or 0; -1 before init(), -2 if there is no such process set.
    """

    def included() -> int:
        if not context.is_initialized():
            return _NOT_INITIALIZED
        here = context.current()
        if process_set_id != 0 and process_set_id not in here.process_sets:
            return _UNKNOWN_SET
        return int(process_set_id in here.process_set_channels)

    return _number_op(included, name or "process_set_included")


def _number_op(number: Callable[[], int], name: str) -> tf.Tensor:
    def function(arrays: Sequence[HostArray], _: str | None) -> list[HostArray]:
        return [np.array(number(), np.int32)]

    return call_on_arrays(function, [], [NUMBER], name, collective=False)[0]
