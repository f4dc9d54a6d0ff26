"""TensorFlow tensors as numpy arrays, and pinning one GPU per local rank."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core.arrays.memory import Array
from hvdtrain.devices import DeviceWish, device_index, no_gpus
from hvdtrain.topology import Topology

__all__ = ["as_array", "pin_device"]


def as_array(tensor: Any) -> Array:
    """View the elements of an eager tensor, or copy them where they are not in host memory."""
    if tensor.dtype == tf.bfloat16 or "CPU" not in tensor.backing_device:
        copied: Array = np.asarray(tensor.numpy())
        return copied
    return np.asarray(memoryview(tensor))


def pin_device(topology: Topology, wish: DeviceWish) -> int | None:
    """Have this rank see one GPU of its own, or none; return its index (local).

    It must come before anything that touches GPUs.

    Args:
        topology: the place of this rank.
        wish: what it is to take.

    Raises:
        UsageError: cuda is asked for and not there, or there are fewer GPUs than local ranks.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if wish.kind == "cpu" or (wish.kind == "auto" and not gpus):
        tf.config.set_visible_devices([], "GPU")
        return None
    if not gpus:
        raise no_gpus("TensorFlow", os.environ)
    index = device_index(topology, len(gpus), wish)
    tf.config.set_visible_devices(gpus[index], "GPU")
    return index
