"""Operations on values: numbers, lists, arrays and tensors of any backend. All are blocking.

They return numpy arrays, 0-d ones for numbers. `allreduce` also works in traced functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import objects
from hvdtrain.core.arrays import collectives
from hvdtrain.core.compression import Compressions, Compressor
from hvdtrain.core.operations import choose_op
from hvdtrain.core.process_set import global_process_set
from hvdtrain.keras.backends.distributed import current_backend
from hvdtrain.keras.backends.types import KerasVariable, Value, to_array
from hvdtrain.types import ReduceOp

Compression = Compressions(
    __name__, np.ndarray.astype, lambda array: array.dtype.kind == "f", "float16", "bfloat16"
)
NoneCompressor = Compression.none
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16


@collective
def broadcast_variables(variables: Iterable[KerasVariable], root_rank: int) -> None:
    """Overwrite variables of Keras with those of `root_rank` (collective).

    Args:
        variables: variables of any shape and dtype, in the same order on every rank: model.weights
            or optimizer.variables, for example.
        root_rank: rank that sends its values.

    Raises:
        MismatchError: number, shapes or dtypes differ between ranks; says where.
    """
    variables = list(variables)
    objects.require_equal_variables(described(variables), "broadcast_variables")
    arrays = [to_array(variable) for variable in variables]
    names = [f"broadcast_variables.{number}" for number in range(len(arrays))]
    bytes_of = [a.view(np.uint8) if a.dtype.itemsize == 1 else a for a in arrays]  # float8, too
    values = collectives.broadcast(bytes_of, root_rank, names, global_process_set)
    for variable, array, value in zip(variables, arrays, values, strict=True):
        variable.assign(value.view(array.dtype))


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise an error: Keras 3 has no list of all variables.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "Keras 3 has no list of global variables: give fit the callback "
        "BroadcastGlobalVariablesCallback, or use broadcast_variables(model.weights, root_rank)"
    )


def described(variables: Iterable[KerasVariable]) -> list[tuple[str, str]]:
    """Return path and kind of variables; paths differ with what a rank has created."""
    return [(v.path, f"shape {tuple(v.shape)} of {v.dtype}") for v in variables]


@collective
def allreduce(
    value: Value,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Return postscale * op over ranks of (prescale * value_r) (collective).

    In functions that TensorFlow or JAX traces the result is a tensor of theirs, which has a
    gradient if `op` is Average or Sum, and `compression` is ignored.

    Args:
        value: value of any shape, with equal shape and dtype on all ranks.
        name: operation name.
        average: deprecated; False is op=Sum.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        op: Average (the default; truncated towards zero for integers), Sum, Min, Max, Product or
            Adasum.
        compression: compressor, which rounds the value before the reduction.

    Returns:
        The result, an array or traced tensor with the shape and dtype of `value`.
    """
    reduction = choose_op(op, False if average is False else None)
    factors = (float(prescale_factor), float(postscale_factor))
    traced = current_backend().traced_allreduce(value, reduction, name, *factors)
    if traced is not None:
        return traced
    sent, rounded = compression.compress(to_array(value))
    (result,) = collectives.allreduce([sent], reduction, name, *factors, global_process_set)
    return compression.decompress(result, rounded)


@collective
def allgather(value: Value, name: str | None = None) -> HostArray:
    """Return the rows of all ranks, ordered by rank (collective).

    Args:
        value: value [rows, ...] of any dtype, of which only `rows` may differ between ranks; a
            number counts as one row.
        name: operation name.
    """
    ((result, _),) = collectives.allgather([to_array(value)], name, global_process_set)
    return result


@collective
def broadcast(value: Value, root_rank: int, name: str | None = None) -> HostArray:
    """Return the value of `root_rank` on every rank (collective).

    Args:
        value: value of any shape, with equal shape and dtype on all ranks.
        root_rank: rank that sends its value.
        name: operation name.
    """
    return collectives.broadcast([to_array(value)], root_rank, [name], global_process_set)[0]


@collective
def reducescatter(
    value: Value, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE
) -> HostArray:
    """Reduce a value and return this rank's rows of the result (collective).

    Rows are divided as evenly as possible; lower ranks get more.

    Args:
        value: value [rows, ...], with equal shape and dtype on all ranks.
        name: operation name.
        op: Average, Sum, Min, Max or Product.
    """
    arrays = [to_array(value)]
    return collectives.reducescatter(arrays, op, name, 1.0, 1.0, global_process_set)[0]
