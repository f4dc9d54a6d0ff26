"""TensorFlow tensors as numpy arrays, and pinning one GPU per local rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.tensors.arrays.memory import Array
from hvdtrain.topology import Topology, device_index

__all__ = ["as_array", "pin_device"]


def as_array(tensor: Any) -> Array:
    """View the elements of an eager tensor, or copy them where they are not in host memory."""
    if tensor.dtype == tf.bfloat16 or "CPU" not in tensor.backing_device:
        copied: Array = np.asarray(tensor.numpy())
        return copied
    return np.asarray(memoryview(tensor))


def pin_device(topology: Topology) -> None:
    """Have this rank see one GPU of its own, if there are GPUs (local).

    Raises:
        UsageError: there are fewer GPUs than local ranks.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[device_index(topology, len(gpus))], "GPU")
