"""Variables that are equal on all ranks at the start, and objects sent between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import objects
from hvdtrain.core.arrays import collectives
from hvdtrain.core.process_set import (
    ProcessSet,
    channel_of,
    global_process_set,
    require_process_set,
)
from hvdtrain.tensorflow.graph import Variable, call_on_arrays, do_not_convert

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]

T = TypeVar("T")


@do_not_convert
@collective
def broadcast_variables(
    variables: Iterable[Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Overwrite variables with those of `root_rank` (collective).

    Args:
        variables: variables of TensorFlow or Keras, of any shape and dtype, in the same order on
            every rank.
        root_rank: world rank that sends its values.
        process_set: ranks that take part.
        inplace: ignored.

    Returns:
        None in eager mode; in a graph the operation that overwrites the variables.

    Raises:
        MismatchError: number, shapes or dtypes differ between ranks.
    """
    return _overwritten(list(variables), root_rank, None, process_set)[1]


@do_not_convert
@collective
def broadcast_(
    variables: Iterable[Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Overwrite variables with those of `root_rank` and return the values (collective).

    Args:
        variables: variables of TensorFlow or Keras, of any shape and dtype, in the same order on
            every rank.
        root_rank: world rank that sends its values.
        name: operation name.
        process_set: ranks that take part.

    Returns:
        The new values, with the shapes and dtypes of the variables.
    """
    values, assigned = _overwritten(list(variables), root_rank, name, process_set)
    with tf.control_dependencies([] if assigned is None else [assigned]):
        return [tf.identity(value) for value in values]


@collective
def _overwritten(
    variables: Sequence[Variable], root_rank: int, name: str | None, process_set: ProcessSet
) -> tuple[list[tf.Tensor], tf.Operation | None]:
    """Overwrite variables; return the root rank's values, and in a graph the operation."""
    name = name or "broadcast_variables"
    names = [f"{name}.{number}" for number in range(len(variables))]

    def function(arrays: Sequence[HostArray], _: str | None) -> list[HostArray]:
        kinds = [f"shape {array.shape} of {array.dtype.name}" for array in arrays]
        own = [(f"variable {number}", kind) for number, kind in enumerate(kinds)]
        objects.require_equal_variables(own, name, channel_of(process_set))
        return collectives.broadcast(arrays, root_rank, names, process_set)

    own = [tf.convert_to_tensor(variable) for variable in variables]
    values = call_on_arrays(function, own, own, name) if own else []
    assigned = [variable.assign(v) for variable, v in zip(variables, values, strict=True)]
    return values, None if tf.executing_eagerly() else tf.group(*assigned)


@do_not_convert
@collective
def broadcast_global_variables(root_rank: int) -> tf.Operation:
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


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a session of TensorFlow 1 is created.

    Args:
        root_rank: rank that sends its values.
        device: ignored.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: tf.Operation | None = None

    @collective
    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    @collective
    def after_create_session(
        self, session: tf.compat.v1.Session, coord: tf.train.Coordinator
    ) -> None:
        """Run the broadcast (collective).

        Args:
            session: the session that was created.
            coord: ignored.
        """
        session.run(self.bcast_op)


@collective
def broadcast_object(
    obj: T,
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Return the object of `root_rank` on every rank (collective, blocking).

    Args:
        obj: picklable object; ignored on other ranks.
        root_rank: world rank that sends its object.
        session: ignored.
        name: operation name, equal on all ranks.
        process_set: ranks that take part.
    """
    received: T = objects.broadcast_object(obj, root_rank, name, channel_of(process_set))
    return received


def broadcast_object_fn(
    root_rank: int = 0,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object; see `broadcast_object`.

    Args:
        root_rank: world rank that sends its object.
        session: ignored.
        name: operation name, equal on all ranks.
        process_set: ranks that take part.
    """
    members = require_process_set(process_set)
    return lambda obj: broadcast_object(obj, root_rank, session, name, members)


@collective
def allgather_object(
    obj: T,
    session: tf.compat.v1.Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Return the objects of all ranks, ordered by rank (collective, blocking).

    Args:
        obj: picklable object.
        session: ignored.
        name: operation name, equal on all ranks.
        process_set: ranks that take part.
    """
    gathered: list[T] = objects.allgather_object(obj, name, channel_of(process_set))
    return gathered
