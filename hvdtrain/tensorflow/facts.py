"""Where a rank is, as operations, which tell it when a graph runs. All are local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core import context, horovod_api
from hvdtrain.core.arrays.memory import Array
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.tensorflow.graph.call import call

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

# What Horovod says in place of 0 or 1.
_NOT_INITIALIZED = -1
_UNKNOWN_SET = -2


@unconverted
def rank_op(name: str | None = None) -> Any:
    """Return the number of this rank, int32 []."""
    return _fact(horovod_api.rank, name or "rank")


@unconverted
def local_rank_op(name: str | None = None) -> Any:
    """Return the number of this rank on its node, int32 []."""
    return _fact(horovod_api.local_rank, name or "local_rank")


@unconverted
def local_size_op(name: str | None = None) -> Any:
    """Return how many ranks are on this rank's node, int32 []."""
    return _fact(horovod_api.local_size, name or "local_size")


@unconverted
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return how many ranks a process set has, int32 []."""

    def size() -> int:
        here = context.current()
        if process_set_id == 0:
            return here.topology.size
        if process_set_id not in here.process_sets:
            raise ValueError(f"there is no process set number {process_set_id}")
        return len(here.process_sets[process_set_id])

    return _fact(size, name or "size")


@unconverted
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 on ranks of a process set, else 0; negative where there is none; int32 []."""

    def included() -> int:
        if not context.is_initialized():
            return _NOT_INITIALIZED
        here = context.current()
        if process_set_id != 0 and process_set_id not in here.process_sets:
            return _UNKNOWN_SET
        return int(process_set_id in here.process_set_channels)

    return _fact(included, name or "process_set_included")


def _fact(fact: Callable[[], int], name: str) -> Any:
    def function(arrays: Sequence[Array], _: str | None) -> list[Array]:
        return [np.array(fact(), np.int32)]

    return call(function, [], [tf.int32], [[]], name, collective=False)[0]
