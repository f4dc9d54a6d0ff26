"""TensorFlow tensors as numpy arrays."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray


def as_array(tensor: tf.Tensor) -> HostArray:
    """Return an eager tensor as an array: a view of host memory, else a copy."""
    if tensor.dtype == tf.bfloat16 or "CPU" not in tensor.backing_device:
        copied: HostArray = np.asarray(tensor.numpy())
        return copied
    return np.asarray(memoryview(tensor))
