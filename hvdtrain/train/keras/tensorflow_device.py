"""The device that a rank computes on with TensorFlow."""

from __future__ import annotations

import os

import tensorflow as tf

from hvdtrain.core import context
from hvdtrain.devices import Device, DeviceWish, device_index, no_gpus, thread_share, threads_text
from hvdtrain.topology import Topology
from hvdtrain.train.options import TrainOptions


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


_prepared: list[Device] = []


def prepare(topology: Topology, options: TrainOptions) -> Device:
    """Pin a device or take a share of the cores, and return the device.

    TensorFlow has begun where ranks were lost: the others then keep what they have.
    """
    if context.current().changed and _prepared:
        return _prepared[-1]
    _prepared.append(_prepare(topology, options))
    return _prepared[-1]


def _prepare(topology: Topology, options: TrainOptions) -> Device:
    index = pin_device(topology, options.device_wish)
    threads = thread_share(topology)
    if threads is None:  # TensorFlow itself ignores the variable that the user has set
        text = os.environ["OMP_NUM_THREADS"]
        threads = int(text) if text.isdecimal() else 0
    threading = tf.config.threading
    if threads and threads != threading.get_intra_op_parallelism_threads():
        threading.set_intra_op_parallelism_threads(threads)
    if index is None:
        return Device(threads_text(threads or len(os.sched_getaffinity(0))))
    (gpu,) = tf.config.get_visible_devices("GPU")
    name = tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    return Device(f"cuda:{index} ({name})")
