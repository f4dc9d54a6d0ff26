"""Operations on values: numbers, lists, arrays and tensors of any backend. All are blocking.

They return numpy arrays, 0-d ones for numbers. `allreduce` works in traced functions, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from hvdtrain.core import context, objects
from hvdtrain.core.arguments import choose_op
from hvdtrain.core.arrays import move, reduce
from hvdtrain.core.arrays.memory import Array
from hvdtrain.core.process_set import global_process_set
from hvdtrain.errors import MismatchError
from hvdtrain.keras.backends.choose import chosen
from hvdtrain.keras.backends.compression import Compression, Compressor
from hvdtrain.types import ReduceOp

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "reducescatter",
    "refuse_different",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Return postscale * op over ranks of (prescale * value_r) (collective).

    In functions that TensorFlow or JAX traces the result is a tensor of theirs, with a gradient
    where `op` is Average or Sum, and `compression` makes no difference.

    Args:
        value: of equal shape and type on all ranks.
        name: of the operation.
        average: deprecated; False is op=Sum.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.
        op: Average (the default; for integers truncated towards zero), Sum, Min, Max, Product
            or Adasum.
        compression: how the value is rounded before.
    """
    reduction = choose_op(op, False if average is False else None)
    factors = (float(prescale_factor), float(postscale_factor))
    if chosen().is_symbolic(value):
        return chosen().allreduce(value, reduction, name, *factors)
    array = _array(value)
    rounds = compression.dtype is not None and array.dtype.kind == "f"
    sent = array.astype(compression.dtype) if rounds else array
    (result,) = reduce.allreduce([sent], reduction, name, *factors, global_process_set)
    return result.astype(array.dtype, copy=False)


def allgather(value: Any, name: str | None = None) -> Array:
    """Return the values of all ranks, concatenated along the first dimension (collective).

    Args:
        value: only the first dimension may differ between ranks; a number counts as one element.
        name: of the operation.
    """
    ((result, _),) = move.allgather([_array(value)], name, global_process_set)
    return result


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Array:
    """Return rank `root_rank`'s value on every rank (collective).

    Args:
        value: of equal shape and type on all ranks.
        root_rank: whose value it is.
        name: of the operation.
    """
    return move.broadcast([_array(value)], root_rank, [name], global_process_set)[0]


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE) -> Array:
    """Return this rank's part of a reduction, cut along the first dimension (collective).

    Parts are as even as can be; lower ranks get the larger ones.
    """
    return reduce.reducescatter([_array(value)], op, name, 1.0, 1.0, global_process_set)[0]


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Overwrite variables of Keras with those of `root_rank` (collective).

    Args:
        variables: in the same order on every rank: model.weights, optimizer.variables.
        root_rank: whose values every rank gets.

    Raises:
        MismatchError: number, shapes or types differ between ranks; says where.
    """
    variables = list(variables)
    refuse_different(variables, "broadcast_variables")
    arrays = [_array(variable) for variable in variables]
    names = [f"broadcast_variables.{number}" for number in range(len(arrays))]
    values = move.broadcast(arrays, root_rank, names, global_process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse: Keras 3 keeps no list of all variables.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "Keras 3 has no list of global variables: give fit the callback "
        "BroadcastGlobalVariablesCallback, or use broadcast_variables(model.weights, root_rank)"
    )


def refuse_different(variables: Iterable[Any], what: str) -> None:
    """Refuse variables that are not the same on all ranks (collective).

    Args:
        variables: in the same order on every rank.
        what: they are for.

    Raises:
        MismatchError: number, shapes or types differ between ranks; says where.
    """
    here = context.current().topology
    own = [(tuple(variable.shape), variable.dtype, variable.path) for variable in variables]
    told = objects.allgather_object(own, f"shapes for {what}")
    for rank, theirs in enumerate(told):
        difference = _difference(theirs, told[0])
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{here.size}] {what}: {difference}. Build the same model on "
                "every rank"
            )


def _difference(theirs: list[Any], first: list[Any]) -> str | None:
    """Say what differs from rank 0; paths may, because they count what else a rank has made."""
    for (shape, dtype, path), (first_shape, first_dtype, first_path) in zip(
        theirs, first, strict=False
    ):
        if (shape, dtype) != (first_shape, first_dtype):
            return (
                f"{path} has shape {shape} of {dtype}, but rank 0's {first_path} has shape "
                f"{first_shape} of {first_dtype}"
            )
    if len(theirs) != len(first):
        return f"{len(theirs)} variables, but rank 0 has {len(first)}"
    return None


def _array(value: Any) -> Array:
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    return np.ascontiguousarray(value).reshape(np.shape(value))
