"""Collective operations through which gradients flow, by Horovod's conventions.

A loss is taken for the mean over ranks: the gradients that ranks send back through an operation are
averaged unless the operation itself says otherwise. Gradients can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.arrays import collectives
from hvdtrain.core.gathers import rows_of_rank
from hvdtrain.core.operations import check_has_gradient
from hvdtrain.core.process_set import ProcessSet, can_lose_ranks, require_process_set
from hvdtrain.tensorflow.graph import NUMBER, ArrayFunction, automatic_name, call_on_arrays
from hvdtrain.types import ReduceOp

# Takes the gradients of an operation's outputs, its inputs that have gradients, and its outputs.
_Backward: TypeAlias = (
    "Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor]], list[tf.Tensor]]"
)


@dataclass(frozen=True)
class Options:
    """What an operation is told beside its tensors."""

    process_set: ProcessSet
    name: str | None = None
    ignore_name_scope: bool = False
    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0

    def __post_init__(self) -> None:
        require_process_set(self.process_set)

    def back(self, op: ReduceOp | None = None) -> Options:
        """Return the options of the operation that brings gradients back: averages, or `op`."""
        return Options(
            self.process_set,
            ignore_name_scope=self.ignore_name_scope,
            op=op or ReduceOp.AVERAGE,
        )


@collective
def _run(
    kind: str,
    function: ArrayFunction,
    tensors: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor | tf.TensorSpec],
    how: Options,
    backward: _Backward,
) -> list[tf.Tensor]:
    """Run an operation with a gradient; the results have the shapes and dtypes of `results`.

    TensorFlow prunes what a gradient does not depend on, so `backward` must need the same
    operations on every rank.
    """
    name = automatic_name(kind, tensors) if how.name is None else how.name

    def forward(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return call_on_arrays(function, inputs, results, name, how.ignore_name_scope)

    indices = [i for i, t in enumerate(tensors) if t.dtype.is_floating or t.dtype.is_complex]
    if not indices:
        return forward(tensors)

    def operation(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        outputs = forward(inputs)

        def gradient(*upstream: tf.Tensor) -> Any:
            given = [tf.convert_to_tensor(upstream[i]) for i in indices]
            own = backward(given, [tensors[i] for i in indices], outputs)
            found = dict(zip(indices, own, strict=False))
            return [found.get(i) for i in range(len(inputs))] if len(inputs) > 1 else found[0]

        return outputs, gradient

    outputs: list[tf.Tensor] = tf.custom_gradient(operation)(*tensors)
    return outputs


def _grouped(kind: str, tensors: Sequence[tf.Tensor]) -> str:
    return kind if len(tensors) == 1 else f"Grouped{kind}"


def size_as(dtype: tf.DType, process_set: ProcessSet) -> tf.Tensor:
    """Return the number of ranks of a process set, read when the graph runs if it can change."""

    if context.current().failures is None:
        return tf.cast(process_set.size(), dtype)

    def size(arrays: Sequence[HostArray], _: str | None) -> list[HostArray]:
        return [np.array(process_set.size(), np.int32)]

    return tf.cast(call_on_arrays(size, [], [NUMBER], "size", collective=False)[0], dtype)


@collective
def allreduce(tensors: Sequence[tf.Tensor], how: Options) -> list[tf.Tensor]:
    """Return postscale * op over ranks of (prescale * tensor_r); gradients are reduced so, too."""

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return collectives.allreduce(
            arrays, how.op, key, how.prescale, how.postscale, how.process_set
        )

    def backward(upstream: Sequence[tf.Tensor], *_: object) -> list[tf.Tensor]:
        check_has_gradient("allreduce", how.op)
        return allreduce(upstream, replace(how, name=None))

    return _run(_grouped("Allreduce", tensors), function, tensors, tensors, how, backward)


@collective
def allgather(tensors: Sequence[tf.Tensor], how: Options) -> list[tf.Tensor]:
    """Concatenate each tensor [rows, ...] of a group over the ranks.

    The gradient of a rank's rows is the average, or the sum if `op` says so, of what ranks send
    back for them.
    """

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return [gathered for gathered, _ in collectives.allgather(arrays, key, how.process_set)]

    def backward(
        upstream: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], _: object
    ) -> list[tf.Tensor]:
        reduced = allreduce(upstream, how.back(how.op))
        # A scalar counts as one row.
        own = [tf.shape(t)[:1] if t.shape.rank else tf.ones([1], tf.int32) for t in inputs]
        counts, rank = allgather(own, how.back()), how.process_set.rank() or 0
        gradients = []
        for gradient, rows, tensor in zip(reduced, counts, inputs, strict=True):
            start = tf.reduce_sum(rows[:rank])
            own_rows = gradient[start : start + rows[rank]]
            gradients.append(tf.reshape(own_rows, tf.shape(tensor)))
        return gradients

    results = [_any_rows(tensor) for tensor in tensors]
    return _run(_grouped("Allgather", tensors), function, tensors, results, how, backward)


@collective
def broadcast(tensor: tf.Tensor, root_rank: int, how: Options) -> tf.Tensor:
    """Return one rank's tensor on every rank, whose gradient is the average, or zero elsewhere."""

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return collectives.broadcast(arrays, root_rank, [key], how.process_set)

    def backward(upstream: Sequence[tf.Tensor], *_: object) -> list[tf.Tensor]:
        averaged = allreduce(upstream, how.back())
        if context.current().topology.rank == root_rank:
            return averaged
        # Part of the graph, so that all ranks reduce when this is differentiated again.
        never = tf.zeros_like(averaged[0], tf.bool)
        return [tf.where(never, averaged[0], tf.zeros_like(averaged[0]))]

    return _run("Broadcast", function, [tensor], [tensor], how, backward)[0]


@collective
def alltoall(tensor: tf.Tensor, splits: tf.Tensor | None, how: Options) -> list[tf.Tensor]:
    """Send rows to every rank; return those received, and their numbers by rank, int32 [size].

    Gradients go back to the ranks that the rows came from.
    """

    def function(arrays: Sequence[HostArray], key: str | None) -> tuple[HostArray, HostArray]:
        counts = None if splits is None else arrays[1]
        return collectives.alltoall(arrays[0], counts, key, how.process_set)

    def backward(
        upstream: Sequence[tf.Tensor], _: object, outputs: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        return alltoall(upstream[0], outputs[1], how.back())[:1]

    counts = tf.TensorSpec([None if can_lose_ranks() else how.process_set.size()], tf.int32)
    results = [_any_rows(tensor), counts]
    tensors = [tensor] if splits is None else [tensor, splits]
    if how.name is None:
        how = replace(how, name=automatic_name("Alltoall", [tensor]))
    return _run("Alltoall", function, tensors, results, how, backward)


@collective
def reducescatter(tensors: Sequence[tf.Tensor], how: Options) -> list[tf.Tensor]:
    """Reduce a group and return this rank's rows; gradients of all rows are gathered."""
    size, rank = how.process_set.size() or 1, how.process_set.rank() or 0

    def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
        return collectives.reducescatter(
            arrays, how.op, key, how.prescale, how.postscale, how.process_set
        )

    def rows_of(tensor: tf.Tensor) -> tf.TensorSpec:
        if tensor.shape.rank in (None, 0):  # a scalar is refused when the operation runs
            return tf.TensorSpec(None, tensor.dtype)
        known = tensor.shape[0] is not None and not can_lose_ranks()
        rows = rows_of_rank(tensor.shape[0], rank, size) if known else None
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    def backward(upstream: Sequence[tf.Tensor], *_: object) -> list[tf.Tensor]:
        check_has_gradient("reducescatter", how.op)
        factor = how.prescale * how.postscale
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in upstream]
        if how.op is ReduceOp.SUM:
            scaled = [each * size_as(each.dtype, how.process_set) for each in scaled]
        return allgather(scaled, how.back(ReduceOp.SUM))

    results = list(map(rows_of, tensors))
    return _run(_grouped("Reducescatter", tensors), function, tensors, results, how, backward)


def _any_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return a tensor's type and shape, with any number of rows."""
    return tf.TensorSpec(tf.TensorShape([None]).concatenate(tensor.shape[1:]), tensor.dtype)
