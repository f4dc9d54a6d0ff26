"""Calls of Python functions from graphs without an order of their own, each in its own thread.

A collective operation waits for other ranks. If it occupied one of TensorFlow's threads while
waiting, ranks that start their operations in different orders could occupy all of them and wait
forever. So
the graph only starts the operation, and continues when a mutex is free that the operation holds
until it is complete: TensorFlow waits for a mutex in a thread that belongs to the mutex.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.tensorflow.tensors.arrays import as_array

_mutex_numbers = itertools.count()

# A complete run is dropped when this many later runs of its operation have started.
_KEPT_RUNS = 1000


def call_in_thread(
    function: Callable[[Sequence[HostArray]], Sequence[HostArray]],
    tensors: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    name: str,
) -> Sequence[tf.Tensor] | tf.Operation:
    """Add operations to the graph that call a function in a thread of its own."""
    runs = _Runs(function)
    with tf.name_scope(f"{name}/"), tf.device("CPU:0"):
        mutex = tf.raw_ops.MutexV2(container="", shared_name=f"hvdtrain {next(_mutex_numbers)}")
        with tf.control_dependencies(list(tensors)):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        run = tf.py_function(runs.start, [lock, *tensors], tf.int64)
        with tf.control_dependencies([run]):
            complete = tf.raw_ops.MutexLock(mutex=mutex)
        with tf.control_dependencies([complete.op]):
            return tf.numpy_function(runs.finish, [run], list(dtypes))


class _Runs:
    """Runs of a function that were started, each in a thread of its own."""

    def __init__(self, function: Callable[[Sequence[HostArray]], Sequence[HostArray]]) -> None:
        self._function = function
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Sequence[HostArray]]] = {}

    def start(self, lock: tf.Tensor, *tensors: tf.Tensor) -> HostArray:
        """Start a run."""
        number, done = next(self._numbers), Future[Sequence[HostArray]]()
        self._pending[number] = done
        self._drop_abandoned(number - _KEPT_RUNS)
        locks = [lock]

        def run() -> None:
            try:
                done.set_result(self._function([as_array(tensor) for tensor in tensors]))
            except BaseException as error:  # the session is to raise it
                done.set_exception(error)
            finally:
                locks.clear()

        threading.Thread(target=run, name="hvdtrain-operation", daemon=True).start()
        return np.array(number)

    def _drop_abandoned(self, before: int) -> None:
        """Drop complete runs with lower numbers: their session failed before taking the results."""
        # Iterate over a copy: sessions of one graph start and finish runs in their own threads.
        for number, done in self._pending.copy().items():
            if number < before and done.done():
                self._pending.pop(number, None)

    def finish(self, number: np.integer[Any] | int) -> list[HostArray]:
        """Return the results of a complete run, or raise its error."""
        return list(self._pending.pop(int(number)).result())
