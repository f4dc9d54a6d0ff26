"""Variables that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeAlias

from hvdtrain.collective import collective
from hvdtrain.core import context, objects
from hvdtrain.core.arrays import collectives
from hvdtrain.core.process_set import global_process_set
from hvdtrain.errors import MismatchError
from hvdtrain.keras.tensors.arrays import to_array
from hvdtrain.keras.tensors.types import Variable

__all__ = ["broadcast_global_variables", "broadcast_variables", "require_equal_variables"]

# Shape, dtype and path of a variable.
_Spec: TypeAlias = tuple[tuple[int, ...], str, str]


@collective
def broadcast_variables(variables: Iterable[Variable], root_rank: int) -> None:
    """Overwrite variables of Keras with those of `root_rank` (collective).

    Args:
        variables: variables of any shape and dtype, in the same order on every rank: model.weights
            or optimizer.variables, for example.
        root_rank: rank that sends its values.

    Raises:
        MismatchError: number, shapes or dtypes differ between ranks; says where.
    """
    variables = list(variables)
    require_equal_variables(variables, "broadcast_variables")
    arrays = [to_array(variable) for variable in variables]
    names = [f"broadcast_variables.{number}" for number in range(len(arrays))]
    values = collectives.broadcast(arrays, root_rank, names, global_process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise an error: Keras 3 has no list of all variables.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "Keras 3 has no list of global variables: give fit the callback "
        "BroadcastGlobalVariablesCallback, or use broadcast_variables(model.weights, root_rank)"
    )


@collective
def require_equal_variables(variables: Iterable[Variable] | None, operation: str) -> None:
    """Check that number, shapes and dtypes of variables are equal on all ranks."""
    here = context.current().topology
    own: list[_Spec] | None = None
    if variables is not None:
        own = [(tuple(v.shape), v.dtype, v.path) for v in variables]
    gathered: list[list[_Spec] | None] = objects.allgather_object(own, f"shapes for {operation}")
    first = next((theirs for theirs in gathered if theirs is not None), [])
    for rank, theirs in enumerate(gathered):
        difference = None if theirs is None else _difference(theirs, first)
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{here.size}] {operation}: {difference}. Build the same model on "
                "every rank"
            )


def _difference(theirs: Sequence[_Spec], first: Sequence[_Spec]) -> str | None:
    """Return the first difference from rank 0, or None.

    Paths may differ: they depend on what else a rank has created.
    """
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
