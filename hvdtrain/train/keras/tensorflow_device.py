"""Where a rank computes with TensorFlow."""

from __future__ import annotations

import os

import tensorflow as tf

from hvdtrain.devices import Device
from hvdtrain.tensorflow.tensors.device import pin_device
from hvdtrain.topology import Topology
from hvdtrain.train.loop.threads import thread_share, threads_text
from hvdtrain.train.options import TrainOptions

__all__ = ["prepare"]


def prepare(topology: Topology, options: TrainOptions) -> Device:
    """Pin a device or take a share of the cores; tell which device (local)."""
    index = pin_device(topology, options.device_wish)
    threads = thread_share(topology)
    if threads is None:  # the user has set it for libraries that know the variable
        given = os.environ["OMP_NUM_THREADS"]
        threads = int(given) if given.isdecimal() else 0
    threading = tf.config.threading
    if threads and threads != threading.get_intra_op_parallelism_threads():
        threading.set_intra_op_parallelism_threads(threads)
    if index is None:
        return Device(threads_text(threads or len(os.sched_getaffinity(0))))
    (gpu,) = tf.config.get_visible_devices("GPU")
    name = tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    return Device(f"cuda:{index} ({name})")
