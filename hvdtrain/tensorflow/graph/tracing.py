"""How TensorFlow traces a tf.function: what AutoGraph leaves alone, and the order of operations.

Operations run in the order of the trace, also in functions that the traced one calls. TensorFlow
keeps that order between operations that write to the same resource; a call of a function counts as
a write to all resources that it writes to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.saved_model import save_context

F = TypeVar("F", bound=Callable[..., object])


def do_not_convert(function: F) -> F:
    """Keep AutoGraph from rewriting a function, and what it calls, inside a tf.function."""
    unconverted: F = tf.autograph.experimental.do_not_convert(function)
    return unconverted


def keeps_trace_order(graph: tf.Graph) -> bool:
    """Return whether TensorFlow runs all stateful operations of a graph in the order of the trace.

    It does in functions that are called in eager mode, except those that it makes for gradients.
    """
    ordered = getattr(graph, "_add_control_dependencies", False)
    return bool(ordered) and tf.compat.v1.executing_eagerly_outside_functions()


def next_in_trace_order() -> tf.Operation:
    """Add an operation to the graph that runs after all those that this function added before."""
    if save_context.in_save_context():  # which allows no resources other than the model's
        return tf.no_op()
    return tf.raw_ops.AssignAddVariableOp(resource=_order_resource(), value=0)


@functools.cache
def _order_resource() -> tf.Tensor:
    """Return a resource; a tf.Variable would make TensorFlow trace the calling function twice."""
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="hvdtrain_order")
        tf.raw_ops.AssignVariableOp(resource=handle, value=0)
    return handle
