"""Horovod's operations on TensorFlow tensors, in eager mode and in graphs; see also reductions.

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

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.tensorflow.graph import TensorLike, call_on_arrays, do_not_convert
from hvdtrain.tensorflow.operations import differentiable
from hvdtrain.tensorflow.operations.differentiable import OperationName


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
    return differentiable.allgather(inputs, process_set, OperationName(name, ignore_name_scope))


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
    given = tf.convert_to_tensor(tensor)
    return differentiable.broadcast(
        given, int(root_rank), process_set, OperationName(name, ignore_name_scope)
    )


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
    operation_name = OperationName(name, ignore_name_scope)
    rows, received = differentiable.alltoall(given, counts, process_set, operation_name)
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

    return call_on_arrays(function, [], [tf.int32], [[]], "join")[0]
