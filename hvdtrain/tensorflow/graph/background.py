"""Operations of graphs that TensorFlow runs in an order of its own, in threads of ours.

An operation waits for other ranks. If it held one of TensorFlow's threads meanwhile, ranks that
begin their operations in different orders could hold all of them and wait for ever. So the graph
only starts it, and continues when a mutex is free that it holds until it is complete: TensorFlow
waits for a mutex in a thread of the mutex's own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core.arrays.memory import Array
from hvdtrain.tensorflow.graph.tensors import as_array

__all__ = ["call_in_background"]

_numbers = itertools.count()

# So many later runs of an operation may begin before one that is complete gives its results.
_KEPT_RUNS = 1000


def call_in_background(
    function: Callable[[Sequence[Array]], Sequence[Array]],
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
    name: str,
) -> Any:
    """Run a function of arrays in a thread of its own when the tensors are there (in a graph).

    Args:
        function: may block; must not write to its arguments, nor return them.
        tensors: its arguments.
        dtypes: of its results.
        name: of the nodes' name scope, in full; nothing else has it.

    Returns:
        What tf.numpy_function does.
    """
    runs = _Runs(function)
    with tf.name_scope(f"{name}/"), tf.device("CPU:0"):
        mutex = tf.raw_ops.MutexV2(container="", shared_name=f"hvdtrain {next(_numbers)}")
        with tf.control_dependencies(list(tensors)):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        run = tf.py_function(runs.start, [lock, *tensors], tf.int64)
        with tf.control_dependencies([run]):
            complete = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([complete.op]):
            return tf.numpy_function(runs.finish, [run], list(dtypes))


class _Runs:
    """Runs of a function that are under way, each in a thread of its own."""

    def __init__(self, function: Callable[[Sequence[Array]], Sequence[Array]]) -> None:
        self._function = function
        self._numbers = itertools.count()
        self._under_way: dict[int, Future[Sequence[Array]]] = {}

    def start(self, lock: Any, *tensors: Any) -> Array:
        """Begin a run and return its number; the lock is given back when it is complete."""
        number, done = next(self._numbers), Future[Sequence[Array]]()
        self._under_way[number] = done
        self._drop_abandoned(number - _KEPT_RUNS)
        held = [lock]

        def run() -> None:
            try:
                done.set_result(self._function([as_array(tensor) for tensor in tensors]))
            except BaseException as error:  # the session is to raise it
                done.set_exception(error)
            finally:
                held.clear()

        threading.Thread(target=run, name="hvdtrain-operation", daemon=True).start()
        return np.array(number)

    def _drop_abandoned(self, before: int) -> None:
        """Forget complete runs with lower numbers: their session failed before it took them."""
        # A copy is made at once: sessions of one graph begin and finish runs in their own threads.
        for number, done in self._under_way.copy().items():
            if number < before and done.done():
                self._under_way.pop(number, None)

    def finish(self, number: Any) -> list[Array]:
        """Return the results of a complete run, or raise its error."""
        return list(self._under_way.pop(int(number)).result())
