"""The order of operations in a tf.function, and in functions that it calls: that of the trace.

TensorFlow keeps it between operations that write to one resource; a call of a function counts as
one that writes to all that are written to in it.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import save_context

__all__ = ["is_in_order", "next_in_order"]


def is_in_order(graph: Any) -> bool:
    """Return whether TensorFlow runs what has effects in the order of the trace, all of it.

    It does in functions that are called in eager mode, but for those that it makes for gradients.
    """
    ordered = getattr(graph, "_add_control_dependencies", False)
    return bool(ordered) and tf.compat.v1.executing_eagerly_outside_functions()


def next_in_order() -> Any:
    """Add an operation to the graph that runs after all that were added by this before."""
    if save_context.in_save_context():  # which takes no resource that is not the model's
        return tf.no_op()
    return tf.raw_ops.AssignAddVariableOp(resource=_written(), value=0)


@functools.cache
def _written() -> Any:
    """Return a resource; a tf.Variable would have the function traced twice that makes it."""
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="hvdtrain_order")
        tf.raw_ops.AssignVariableOp(resource=handle, value=0)
    return handle
