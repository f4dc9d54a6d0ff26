"""Start all ranks from the same variables, and send objects between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.core import objects
from hvdtrain.core.arrays import move
from hvdtrain.core.arrays.memory import Array
from hvdtrain.core.process_set import (
    ProcessSet,
    channel_of,
    global_process_set,
    require_process_set,
)
from hvdtrain.errors import MismatchError
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.tensorflow.graph.call import call

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


@unconverted
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with those of `root_rank` (collective).

    Args:
        variables: of TensorFlow or Keras, in the same order on every rank.
        root_rank: whose values every rank gets, a rank of the world.
        process_set: the ranks that take part.
        inplace: makes no difference.

    Returns:
        None in eager mode; in a graph the operation that does it.

    Raises:
        MismatchError: number, shapes or types differ between ranks (as for all operations).
    """
    variables = list(variables)
    values = _received(variables, root_rank, None, process_set)
    pairs = zip(variables, values, strict=True)
    assigned = [variable.assign(value) for variable, value in pairs]
    return None if tf.executing_eagerly() else tf.group(*assigned)


@unconverted
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables with those of `root_rank` and return the values (collective)."""
    variables = list(variables)
    values = _received(variables, root_rank, name, process_set)
    pairs = zip(variables, values, strict=True)
    assigned = [variable.assign(value) for variable, value in pairs]
    with tf.control_dependencies([] if tf.executing_eagerly() else [tf.group(*assigned)]):
        return [tf.identity(value) for value in values]


def _received(
    variables: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet
) -> list[Any]:
    name = name or "broadcast_variables"
    names = [f"{name}.{number}" for number in range(len(variables))]

    def function(arrays: Sequence[Array], _: str | None) -> list[Array]:
        _refuse_different(arrays, name, process_set)
        return move.broadcast(arrays, root_rank, names, process_set)

    values = [tf.convert_to_tensor(variable) for variable in variables]
    dtypes, shapes = [value.dtype for value in values], [value.shape for value in values]
    return call(function, values, dtypes, shapes, name) if values else []


def _refuse_different(arrays: Sequence[Array], name: str, process_set: ProcessSet) -> None:
    own = [(array.shape, array.dtype.name) for array in arrays]
    channel = channel_of(process_set)
    told = objects.allgather_object(own, f"shapes for {name}", channel)
    for rank, theirs in zip(channel.ranks, told, strict=True):
        if theirs == told[0]:
            continue
        first = f"rank {channel.ranks[0]}"
        what = f"{len(theirs)} variables, but {first} has {len(told[0])}"
        for number, (mine, other) in enumerate(zip(theirs, told[0], strict=False)):
            if mine != other:
                what = f"variable {number}: {_shown(mine)}, but {first} has {_shown(other)}"
                break
        raise MismatchError(f"[rank {rank}] {name}: {what}. Build the same model on every rank")


def _shown(variable: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = variable
    return f"shape {shape} of {dtype}"


@unconverted
def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that broadcasts all global variables of a graph of TensorFlow 1.

    Raises:
        RuntimeError: in eager mode, where there is no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() is for graphs of TensorFlow 1: in eager mode use "
            "broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all global variables when a session of TensorFlow 1 begins.

    Args:
        root_rank: whose values every rank gets.
        device: makes no difference.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it (collective)."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank `root_rank`'s object on every rank (collective, blocking).

    Args:
        obj: anything that pickles; looked at on `root_rank` only.
        root_rank: a rank of the world.
        session: for Horovod's sake; it is not needed.
        name: shown in messages; must be equal on all ranks.
        process_set: the ranks that take part.
    """
    return objects.broadcast_object(obj, root_rank, name, channel_of(process_set))


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object; see `broadcast_object`."""
    members = require_process_set(process_set)
    return lambda obj: broadcast_object(obj, root_rank, session, name, members)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, by rank, on every rank (collective, blocking)."""
    return objects.allgather_object(obj, name, channel_of(process_set))
