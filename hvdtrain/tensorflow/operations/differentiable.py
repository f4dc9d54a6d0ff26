"""Operations through which gradients flow, by Horovod's conventions.

A loss is understood as the mean over ranks: what the ranks send back through an operation is
averaged, where the operation itself does not say otherwise. Gradients are differentiable again.
All take the name of the operation, or None, and return lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.core import context
from hvdtrain.core.arrays import move, reduce
from hvdtrain.core.arrays.memory import Array
from hvdtrain.core.collectives.reducescatter import rows_of_rank
from hvdtrain.core.process_set import ProcessSet, require_process_set
from hvdtrain.tensorflow.graph.call import automatic_name, call
from hvdtrain.types import ReduceOp

__all__ = [
    "Naming",
    "Reduction",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "reducescatter",
]

Tensors = Sequence[Any]


@dataclass(frozen=True)
class Naming:
    """How an operation is called.

    Attributes:
        name: the user's; None for one from the tensors.
        ignore_name_scope: leave the name scope out of it.
    """

    name: str | None = None
    ignore_name_scope: bool = False

    def of(self, kind: str, tensors: Tensors) -> Naming:
        """Return it with a name for an operation of this kind."""
        if self.name is not None:
            return self
        return Naming(automatic_name(kind, tensors), self.ignore_name_scope)


@dataclass(frozen=True)
class Reduction:
    """How tensors are reduced: postscale * op over ranks of (prescale * tensor_r)."""

    op: ReduceOp
    process_set: ProcessSet
    prescale: float = 1.0
    postscale: float = 1.0

    def __post_init__(self) -> None:
        require_process_set(self.process_set)


def allreduce(tensors: Tensors, reduction: Reduction, naming: Naming) -> list[Any]:
    """Reduce a group; its gradient is reduced in the same way."""
    how = reduction
    kind = "Allreduce" if len(tensors) == 1 else "GroupedAllreduce"
    named = naming.of(kind, tensors)

    def function(arrays: Sequence[Array], name: str | None) -> list[Array]:
        return reduce.allreduce(arrays, how.op, name, how.prescale, how.postscale, how.process_set)

    def forward(inputs: Tensors) -> list[Any]:
        dtypes, shapes = [t.dtype for t in inputs], [t.shape for t in inputs]
        return call(function, inputs, dtypes, shapes, named.name, named.ignore_name_scope)

    def backward(upstream: Tensors, given: Tensors) -> list[Any]:
        return allreduce(upstream, how, Naming(None, naming.ignore_name_scope))

    return _differentiable(forward, backward, tensors)


def allgather(tensors: Tensors, process_set: ProcessSet, naming: Naming) -> list[Any]:
    """Gather a group; the gradient of a rank's part is the average of what ranks send back."""
    require_process_set(process_set)
    kind = "Allgather" if len(tensors) == 1 else "GroupedAllgather"
    named = naming.of(kind, tensors)
    unnamed = Naming(None, naming.ignore_name_scope)

    def function(arrays: Sequence[Array], name: str | None) -> list[Array]:
        return [gathered for gathered, _ in move.allgather(arrays, name, process_set)]

    def forward(inputs: Tensors) -> list[Any]:
        shapes = [tf.TensorShape([None]).concatenate(t.shape[1:]) for t in inputs]
        dtypes = [t.dtype for t in inputs]
        return call(function, inputs, dtypes, shapes, named.name, named.ignore_name_scope)

    def backward(upstream: Tensors, given: Tensors) -> list[Any]:
        averaged = allreduce(upstream, Reduction(ReduceOp.AVERAGE, process_set), unnamed)
        own = [_rows(tensor) for tensor in given]
        counts = allgather(own, process_set, unnamed)
        rank = process_set.rank() or 0
        parts = []
        for gradient, rows, tensor in zip(averaged, counts, given, strict=True):
            start = tf.reduce_sum(rows[:rank])
            part = gradient[start : start + rows[rank]]
            parts.append(tf.reshape(part, tf.shape(tensor)))
        return parts

    return _differentiable(forward, backward, tensors)


def broadcast(tensor: Any, root_rank: int, process_set: ProcessSet, naming: Naming) -> Any:
    """Broadcast; the root rank's gradient is the average, the other ranks' is zero."""
    require_process_set(process_set)
    named = naming.of("Broadcast", [tensor])

    def function(arrays: Sequence[Array], name: str | None) -> list[Array]:
        return move.broadcast(arrays, root_rank, [name], process_set)

    def forward(inputs: Tensors) -> list[Any]:
        (given,) = inputs
        dtypes, shapes = [given.dtype], [given.shape]
        return call(function, inputs, dtypes, shapes, named.name, named.ignore_name_scope)

    def backward(upstream: Tensors, given: Tensors) -> list[Any]:
        unnamed = Naming(None, naming.ignore_name_scope)
        averaged = allreduce(upstream, Reduction(ReduceOp.AVERAGE, process_set), unnamed)
        if context.current().topology.rank == root_rank:
            return averaged
        with tf.control_dependencies(averaged):  # for which the root waits
            return [tf.zeros_like(upstream[0])]

    return _differentiable(forward, backward, [tensor])[0]


def alltoall(
    tensor: Any, splits: Any | None, process_set: ProcessSet, naming: Naming
) -> tuple[Any, Any]:
    """Exchange rows; gradients go back to where the rows came from."""
    require_process_set(process_set)
    named = naming.of("Alltoall", [tensor])
    received: list[Any] = []

    def function(arrays: Sequence[Array], name: str | None) -> tuple[Array, Array]:
        return move.alltoall(arrays[0], arrays[1] if len(arrays) > 1 else None, name, process_set)

    def forward(inputs: Tensors) -> list[Any]:
        (given,) = inputs
        shapes = [tf.TensorShape([None]).concatenate(given.shape[1:]), [process_set.size()]]
        arguments = [given] if splits is None else [given, splits]
        dtypes = [given.dtype, tf.int32]
        rows, counts = call(
            function, arguments, dtypes, shapes, named.name, named.ignore_name_scope
        )
        received.append(counts)
        return [rows, counts]

    def backward(upstream: Tensors, given: Tensors) -> list[Any]:
        unnamed = Naming(None, naming.ignore_name_scope)
        return [alltoall(upstream[0], received[-1], process_set, unnamed)[0]]

    rows, counts = _differentiable(forward, backward, [tensor])
    return rows, counts


def reducescatter(tensors: Tensors, reduction: Reduction, naming: Naming) -> list[Any]:
    """Reduce and scatter a group; the gradients of all parts are gathered."""
    how = reduction
    kind = "Reducescatter" if len(tensors) == 1 else "GroupedReducescatter"
    named = naming.of(kind, tensors)
    size, rank = how.process_set.size() or 1, how.process_set.rank() or 0

    def function(arrays: Sequence[Array], name: str | None) -> list[Array]:
        return reduce.reducescatter(
            arrays, how.op, name, how.prescale, how.postscale, how.process_set
        )

    def forward(inputs: Tensors) -> list[Any]:
        dtypes, shapes = [t.dtype for t in inputs], [_part(t.shape, rank, size) for t in inputs]
        return call(function, inputs, dtypes, shapes, named.name, named.ignore_name_scope)

    def backward(upstream: Tensors, given: Tensors) -> list[Any]:
        factor = how.prescale * how.postscale * (size if how.op is ReduceOp.SUM else 1)
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in upstream]
        return allgather(scaled, how.process_set, Naming(None, naming.ignore_name_scope))

    return _differentiable(forward, backward, tensors)


def _part(shape: Any, rank: int, size: int) -> Any:
    """Return the shape of a rank's part of a tensor, as far as it is known."""
    if shape.rank in (None, 0):  # a scalar is refused when the operation runs
        return tf.TensorShape(None)
    rows = None if shape[0] is None else rows_of_rank(shape[0], rank, size)
    return tf.TensorShape([rows]).concatenate(shape[1:])


def _rows(tensor: Any) -> Any:
    """Return how many rows a tensor has, int32 [1]; a scalar counts as one."""
    if tensor.shape.rank == 0:
        return tf.ones([1], tf.int32)
    return tf.shape(tensor)[:1]


def _differentiable(
    forward: Callable[[Tensors], list[Any]],
    backward: Callable[[Tensors, Tensors], list[Any]],
    tensors: Tensors,
) -> list[Any]:
    """Run an operation whose gradient is what `backward` makes of its results' gradients.

    Of what TensorFlow needs for a gradient only that runs. So `backward` must need the same
    operations on every rank.

    Args:
        forward: returns a result for each tensor, and perhaps more.
        backward: takes the gradients of the fractional results, and the tensors they are of.
        tensors: the arguments.
    """
    places = [i for i, t in enumerate(tensors) if t.dtype.is_floating or t.dtype.is_complex]
    if not places:
        return forward(tensors)

    @tf.custom_gradient
    def operation(*inputs: Any) -> Any:
        def gradient(*upstream: Any) -> Any:
            fractional = [tf.convert_to_tensor(upstream[place]) for place in places]
            results = dict(
                zip(places, backward(fractional, [tensors[i] for i in places]), strict=True)
            )
            return [results.get(i) for i in range(len(inputs))] if len(inputs) > 1 else results[0]

        return forward(inputs), gradient

    outputs: list[Any] = operation(*tensors)
    return outputs
