"""The device of a rank in TensorFlow."""

from __future__ import annotations

import os

import tensorflow as tf

from hvdtrain.devices import DeviceWish, device_index, no_gpus
from hvdtrain.topology import Topology


def pin_device(topology: Topology, wish: DeviceWish) -> int | None:
    """Make one GPU, or none, visible to this rank and return its index.

    Call it before anything that initializes GPUs.
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
