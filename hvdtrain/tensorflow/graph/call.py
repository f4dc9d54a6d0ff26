"""Functions of numpy arrays as TensorFlow operations, in eager mode and in graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.core.arrays.memory import Array
from hvdtrain.errors import UnsupportedError
from hvdtrain.tensorflow.graph.background import call_in_background
from hvdtrain.tensorflow.graph.errors import translated
from hvdtrain.tensorflow.graph.order import is_in_order, next_in_order
from hvdtrain.tensorflow.graph.tensors import as_array

__all__ = ["Function", "automatic_name", "call"]

# Takes the inputs and the operation's name, None where the core is to number it.
Function = Callable[[Sequence[Array], str | None], Sequence[Array]]

_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_]")
_NOT_IN_NODE_NAMES = re.compile(r"[^A-Za-z0-9_.\-/]")


def automatic_name(kind: str, tensors: Sequence[Any]) -> str | None:
    """Return the name of an operation without one: in a graph that of its tensors.

    A counter would count how often a rank has traced, which may differ. Eager tensors have no
    name, and the core numbers their operations.
    """
    if tf.executing_eagerly():
        return None
    names = dict.fromkeys(_NOT_IN_NAMES.sub("_", t.name) for t in (*tensors[:1], *tensors[-1:]))
    return "_".join([f"Horovod{kind}", *names])


def call(
    function: Function,
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    collective: bool = True,
) -> list[Any]:
    """Run a function of arrays when the tensors are there.

    Args:
        function: blocks until its operation is complete; must not write to its arguments, nor
            return them.
        tensors: its arguments.
        dtypes: of its results.
        shapes: of its results, as far as they are known before it runs.
        name: of the operation; in a graph within the name scope.
        ignore_name_scope: leave the name scope out.
        collective: it waits for other ranks.

    Raises:
        UnsupportedError: XLA compiles the graph.
    """
    if tf.executing_eagerly():
        return _at_once(function, tensors, name)
    graph = tf.compat.v1.get_default_graph()
    _refuse_xla(graph)
    node = _NOT_IN_NODE_NAMES.sub("_", name or "Horovod")
    if not node[0].isalnum():  # with which no node's name may begin
        node = f"Horovod{node}"
    in_order = is_in_order(graph)
    if in_order:
        full = graph.unique_name(node, mark_as_used=False)
    else:
        full = _whole(graph).unique_name(node)
    key = full.rpartition("/")[2] if ignore_name_scope else full

    def run(arrays: Sequence[Array]) -> Sequence[Array]:
        return function(arrays, key)

    if not collective:
        outputs = tf.numpy_function(_unpacked(run), list(tensors), list(dtypes), name=node)
    elif in_order:
        with tf.control_dependencies([next_in_order()]):
            outputs = tf.numpy_function(_unpacked(run), list(tensors), list(dtypes), name=node)
        with tf.control_dependencies(outputs if dtypes else [outputs]):
            next_in_order()
    else:
        outputs = call_in_background(run, list(tensors), list(dtypes), full)
    for output, shape in zip(outputs if dtypes else [], shapes, strict=True):
        output.set_shape(shape)
    return list(outputs) if dtypes else [outputs]


def _unpacked(run: Callable[[Sequence[Array]], Sequence[Array]]) -> Callable[..., list[Array]]:
    # TensorFlow hands over some scalars as such.
    return lambda *arrays: list(run([np.asarray(array) for array in arrays]))


def _at_once(function: Function, tensors: Sequence[Any], name: str | None) -> list[Any]:
    try:
        arrays = function([as_array(tensor) for tensor in tensors], name)
    except Exception as error:
        other = translated(error)
        if other is error:
            raise
        raise other from None
    return [tf.convert_to_tensor(array) for array in arrays]


def _refuse_xla(graph: Any) -> None:
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise UnsupportedError(
            "XLA cannot compile operations that call Python, as hvdtrain's do: use "
            "tf.function(jit_compile=False), in Keras model.compile(jit_compile=False), and call "
            "what XLA is to compile in a tf.function of its own, without hvdtrain's operations"
        )


def _whole(graph: Any) -> Any:
    """Return the graph in which names must be unique.

    In a session branches of a graph may run at the same time. Names outside of a function would
    count how often a rank has traced it.
    """
    while graph.building_function and not tf.compat.v1.executing_eagerly_outside_functions():
        graph = graph.outer_graph
    return graph
