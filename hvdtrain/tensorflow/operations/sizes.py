"""Numbers of ranks in graphs, which stay when ranks are lost and the world is another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.core import context
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.tensorflow.graph.array_calls import call_on_arrays


def size_as(dtype: tf.DType, process_set: ProcessSet) -> tf.Tensor:
    """Return the number of ranks of a process set, read when the graph runs if it can change."""

    if context.current().failures is None:
        return tf.cast(process_set.size(), dtype)

    def size(arrays: Sequence[HostArray], _: str | None) -> list[HostArray]:
        return [np.array(process_set.size(), np.int32)]

    (ranks,) = call_on_arrays(size, [], [tf.int32], [[]], "size", collective=False)
    return tf.cast(ranks, dtype)
