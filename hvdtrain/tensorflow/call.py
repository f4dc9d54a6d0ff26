"""Functions of numpy arrays as TensorFlow operations, in eager mode and in graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdtrain.errors import UnsupportedError
from hvdtrain.tensorflow.errors import translated
from hvdtrain.tensors.arrays.memory import Array
from hvdtrain.tensors.tensorflow import as_array

__all__ = ["Function", "automatic_name", "call"]

# Takes the inputs and the operation's name, None where the core is to number it.
Function = Callable[[Sequence[Array], str | None], Sequence[Array]]

_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_]")
_NOT_IN_NODE_NAMES = re.compile(r"[^A-Za-z0-9_.\-/]")
# Operations whose names contain this bring data into a graph of TensorFlow 1, or need a feed.
_SOURCES = re.compile("Placeholder|Iterator|Dequeue|ReaderRead")
_CHAIN = "_hvdtrain_chain"


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
    chained: bool = True,
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
        chained: in a graph of TensorFlow 1, run one after the other with what came before.

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
    full = graph.unique_name(node, mark_as_used=False)
    key = full.rpartition("/")[2] if ignore_name_scope else full

    def run(*arrays: Any) -> list[Array]:
        # TensorFlow hands over some scalars as such.
        return list(function([np.asarray(array) for array in arrays], key))

    with tf.control_dependencies(_chain(graph, tensors) if chained else []):
        outputs = tf.numpy_function(run, list(tensors), list(dtypes), name=node)
    if chained and outputs:
        _remember(graph, outputs[0].op, tensors)
    for output, shape in zip(outputs if dtypes else [], shapes, strict=True):
        output.set_shape(shape)
    return list(outputs) if dtypes else [outputs]


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


def _chain(graph: Any, tensors: Sequence[Any]) -> list[Any]:
    """Return the operation of ours that must run before one on these tensors.

    An operation that waits for other ranks holds a thread of TensorFlow's. When ranks run theirs
    in different orders, they may hold all threads and wait for ever, so one order is fixed: in
    functions that of the trace (all of them run), in a graph of TensorFlow 1 that of their
    making, but only after what needs no feeds and takes no data that these tensors do not.
    """
    before = _chains(graph)
    if not before or _is_function(graph):
        return [op for op, _ in before[-1:]]
    sources = _sources(tensors)
    return next(([op] for op, theirs in reversed(before) if theirs <= sources), [])


def _remember(graph: Any, op: Any, tensors: Sequence[Any]) -> None:
    sources = frozenset() if _is_function(graph) else _sources(tensors)
    _chains(graph).append((op, sources))


def _is_function(graph: Any) -> bool:
    return getattr(graph, "building_function", False)


def _chains(graph: Any) -> list[tuple[Any, frozenset[Any]]]:
    """Return our operations in this graph and branch or loop, with what each needs."""
    if not hasattr(graph, _CHAIN):
        setattr(graph, _CHAIN, {})
    chains: dict[Any, list[tuple[Any, frozenset[Any]]]] = getattr(graph, _CHAIN)
    return chains.setdefault(graph._get_control_flow_context(), [])


def _sources(tensors: Sequence[Any]) -> frozenset[Any]:
    """Return the operations that need a feed or take data, and that these tensors depend on."""
    seen: set[Any] = set()
    open_ops = {tensor.op for tensor in tensors}
    while open_ops:
        op = open_ops.pop()
        seen.add(op)
        open_ops |= {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
    return frozenset(op for op in seen if _SOURCES.search(op.type))
