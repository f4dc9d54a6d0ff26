"""Rank and size as operations, evaluated when a graph runs. All are local."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.core import context, horovod_api
from hvdtrain.tensorflow.graph import call_on_arrays, do_not_convert

# Horovod's results in place of 0 or 1.
_NOT_INITIALIZED = -1
_UNKNOWN_SET = -2


@do_not_convert
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return the rank of this process, int32 []."""
    return _number_op(horovod_api.rank, name or "rank")


@do_not_convert
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return the local rank of this process on its node, int32 []."""
    return _number_op(horovod_api.local_rank, name or "local_rank")


@do_not_convert
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this rank's node, int32 []."""
    return _number_op(horovod_api.local_size, name or "local_size")


@do_not_convert
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks in a process set, int32 [].

    Args:
        process_set_id: id of the process set; 0 is all ranks.
        name: name of the node.

    Raises:
        ValueError: there is no such process set (when it is evaluated).
    """

    def size() -> int:
        here = context.current()
        if process_set_id == 0:
            return here.topology.size
        if process_set_id not in here.process_sets:
            raise ValueError(f"there is no process set with id {process_set_id}")
        return len(here.process_sets[process_set_id])

    return _number_op(size, name or "size")


@do_not_convert
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank is in a process set, else 0, int32 [].

    Args:
        process_set_id: id of the process set; 0 is all ranks.
        name: name of the node.

    Returns:
        1 or 0; -1 before init(), -2 if there is no such process set.
    """

    def included() -> int:
        if not context.is_initialized():
            return _NOT_INITIALIZED
        here = context.current()
        if process_set_id != 0 and process_set_id not in here.process_sets:
            return _UNKNOWN_SET
        return int(process_set_id in here.process_set_channels)

    return _number_op(included, name or "process_set_included")


def _number_op(number: Callable[[], int], name: str) -> tf.Tensor:
    def function(arrays: Sequence[HostArray], _: str | None) -> list[HostArray]:
        return [np.array(number(), np.int32)]

    return call_on_arrays(function, [], [tf.int32], [[]], name, collective=False)[0]
