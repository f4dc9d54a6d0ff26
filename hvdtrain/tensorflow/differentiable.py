"""Collective operations through which gradients flow, by Horovod's conventions.

A loss is taken for the mean over ranks: the gradients that ranks send back through an operation are
averaged unless the operation itself says otherwise. Gradients can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.arguments import check_has_gradient
from hvdtrain.core.arrays import collectives
from hvdtrain.core.collectives.gathers import rows_of_rank
from hvdtrain.core.process_set import ProcessSet, can_lose_ranks, require_process_set
from hvdtrain.tensorflow.graph import automatic_name, call_on_arrays
from hvdtrain.types import ReduceOp


@dataclass(frozen=True)
class OperationName:
    name: str | None = None
    ignore_name_scope: bool = False

    def or_automatic(self, kind: str, tensors: Sequence[tf.Tensor]) -> OperationName:
        """Return the name, or an automatic one if the user has given none."""
        if self.name is not None:
            return self
        return OperationName(automatic_name(kind, tensors), self.ignore_name_scope)

    def automatic(self) -> OperationName:
        """Return an automatic name, for the gradient of the operation."""
        return OperationName(None, self.ignore_name_scope)


@dataclass(frozen=True)
class Reduction:
    """A reduction: postscale * op over ranks of (prescale * tensor_r)."""

    op: ReduceOp
    process_set: ProcessSet
    prescale: float = 1.0
    postscale: float = 1.0

    def __post_init__(self) -> None:
        require_process_set(self.process_set)


@collective
def differentiable(
    forward: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    backward: Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], list[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Run an operation with a gradient (collective if the operation is).

    TensorFlow prunes what a gradient does not depend on, so `backward` must need the same
    operations on every rank.
    """
    indices = [i for i, t in enumerate(tensors) if t.dtype.is_floating or t.dtype.is_complex]
    if not indices:
        return forward(tensors)

    def operation(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def gradient(*upstream: tf.Tensor) -> Any:
            given = [tf.convert_to_tensor(upstream[i]) for i in indices]
            gradients = backward(given, [tensors[i] for i in indices])
            results = dict(zip(indices, gradients, strict=True))
            return [results.get(i) for i in range(len(inputs))] if len(inputs) > 1 else results[0]

        return forward(inputs), gradient

    outputs: list[tf.Tensor] = tf.custom_gradient(operation)(*tensors)
    return outputs


def size_as(dtype: tf.DType, process_set: ProcessSet) -> tf.Tensor:
    """Return the number of ranks of a process set, read when the graph runs if it can change."""

    if context.current().failures is None:
        return tf.cast(process_set.size(), dtype)

    def size(arrays: Sequence[HostArray], _: str | None) -> list[HostArray]:
        return [np.array(process_set.size(), np.int32)]

    (ranks,) = call_on_arrays(size, [], [tf.int32], [[]], "size", collective=False)
    return tf.cast(ranks, dtype)


@collective
def allreduce(
    tensors: Sequence[tf.Tensor], reduction: Reduction, name: OperationName
) -> list[tf.Tensor]:
    """Reduce a group of tensors; gradients are reduced in the same way."""
    how = reduction
    kind = "Allreduce" if len(tensors) == 1 else "GroupedAllreduce"
    full = name.or_automatic(kind, tensors)

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return collectives.allreduce(
            arrays, how.op, key, how.prescale, how.postscale, how.process_set
        )

    def forward(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        dtypes, shapes = [t.dtype for t in inputs], [t.shape for t in inputs]
        return call_on_arrays(function, inputs, dtypes, shapes, full.name, full.ignore_name_scope)

    def backward(upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        check_has_gradient("allreduce", how.op)
        return allreduce(upstream, how, name.automatic())

    return differentiable(forward, backward, tensors)


@collective
def allgather(
    tensors: Sequence[tf.Tensor],
    process_set: ProcessSet,
    name: OperationName,
    back: ReduceOp = ReduceOp.AVERAGE,
) -> list[tf.Tensor]:
    """Concatenate each tensor [rows, ...] of a group over the ranks.

    The gradient of a rank's rows is the average, or the sum, of what ranks send `back` for them.
    """
    require_process_set(process_set)
    kind = "Allgather" if len(tensors) == 1 else "GroupedAllgather"
    full = name.or_automatic(kind, tensors)

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return [gathered for gathered, _ in collectives.allgather(arrays, key, process_set)]

    def forward(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        shapes = [tf.TensorShape([None]).concatenate(t.shape[1:]) for t in inputs]
        dtypes = [t.dtype for t in inputs]
        return call_on_arrays(function, inputs, dtypes, shapes, full.name, full.ignore_name_scope)

    def backward(upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        reduced = allreduce(upstream, Reduction(back, process_set), name.automatic())
        own = [_row_count(tensor) for tensor in inputs]
        counts = allgather(own, process_set, name.automatic())
        rank = process_set.rank() or 0
        gradients = []
        for gradient, rows, tensor in zip(reduced, counts, inputs, strict=True):
            start = tf.reduce_sum(rows[:rank])
            own_rows = gradient[start : start + rows[rank]]
            gradients.append(tf.reshape(own_rows, tf.shape(tensor)))
        return gradients

    return differentiable(forward, backward, tensors)


@collective
def broadcast(
    tensor: tf.Tensor, root_rank: int, process_set: ProcessSet, name: OperationName
) -> tf.Tensor:
    """Return one rank's tensor on every rank, whose gradient is the average, or zero elsewhere."""
    require_process_set(process_set)
    full = name.or_automatic("Broadcast", [tensor])

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return collectives.broadcast(arrays, root_rank, [key], process_set)

    def forward(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        (given,) = inputs
        dtypes, shapes = [given.dtype], [given.shape]
        return call_on_arrays(function, inputs, dtypes, shapes, full.name, full.ignore_name_scope)

    def backward(upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        average = Reduction(ReduceOp.AVERAGE, process_set)
        averaged = allreduce(upstream, average, name.automatic())
        if context.current().topology.rank == root_rank:
            return averaged
        # Part of the graph, so that all ranks reduce when this is differentiated again.
        never = tf.zeros_like(averaged[0], tf.bool)
        return [tf.where(never, averaged[0], tf.zeros_like(averaged[0]))]

    return differentiable(forward, backward, [tensor])[0]


@collective
def alltoall(
    tensor: tf.Tensor, splits: tf.Tensor | None, process_set: ProcessSet, name: OperationName
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows to every rank; return those received, and their numbers by rank, int32 [size].

    Gradients go back to the ranks that the rows came from.
    """
    require_process_set(process_set)
    full = name.or_automatic("Alltoall", [tensor])
    received: list[tf.Tensor] = []

    def function(arrays: Sequence[HostArray], key: str | None) -> tuple[HostArray, HostArray]:
        counts = arrays[1] if len(arrays) > 1 else None
        return collectives.alltoall(arrays[0], counts, key, process_set)

    def forward(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        (given,) = inputs
        ranks = None if can_lose_ranks() else process_set.size()
        shapes = [tf.TensorShape([None]).concatenate(given.shape[1:]), [ranks]]
        arguments = [given] if splits is None else [given, splits]
        dtypes = [given.dtype, tf.int32]
        rows, counts = call_on_arrays(
            function, arguments, dtypes, shapes, full.name, full.ignore_name_scope
        )
        received.append(counts)
        return [rows, counts]

    def backward(upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [alltoall(upstream[0], received[-1], process_set, name.automatic())[0]]

    rows, counts = differentiable(forward, backward, [tensor])
    return rows, counts


@collective
def reducescatter(
    tensors: Sequence[tf.Tensor], reduction: Reduction, name: OperationName
) -> list[tf.Tensor]:
    """Reduce a group and return this rank's rows; gradients of all rows are gathered."""
    how = reduction
    kind = "Reducescatter" if len(tensors) == 1 else "GroupedReducescatter"
    full = name.or_automatic(kind, tensors)
    size, rank = how.process_set.size() or 1, how.process_set.rank() or 0

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return collectives.reducescatter(
            arrays, how.op, key, how.prescale, how.postscale, how.process_set
        )

    def forward(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        place = None if can_lose_ranks() else (rank, size)
        shapes = [_shape_of_rows(t.shape, place) for t in inputs]
        dtypes = [t.dtype for t in inputs]
        return call_on_arrays(function, inputs, dtypes, shapes, full.name, full.ignore_name_scope)

    def backward(upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        check_has_gradient("reducescatter", how.op)
        factor = how.prescale * how.postscale
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in upstream]
        if how.op is ReduceOp.SUM:
            scaled = [each * size_as(each.dtype, how.process_set) for each in scaled]
        return allgather(scaled, how.process_set, name.automatic(), ReduceOp.SUM)

    return differentiable(forward, backward, tensors)


def _shape_of_rows(shape: tf.TensorShape, place: tuple[int, int] | None) -> tf.TensorShape:
    """Return the shape of a rank's rows of a tensor, as far as it is known."""
    if shape.rank in (None, 0):  # a scalar is refused when the operation runs
        return tf.TensorShape(None)
    rows = None if place is None or shape[0] is None else rows_of_rank(shape[0], *place)
    return tf.TensorShape([rows]).concatenate(shape[1:])


def _row_count(tensor: tf.Tensor) -> tf.Tensor:
    """Return the number of rows of a tensor, int32 [1]; a scalar counts as one row."""
    if tensor.shape.rank == 0:
        return tf.ones([1], tf.int32)
    return tf.shape(tensor)[:1]
