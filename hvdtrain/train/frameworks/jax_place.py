"""Where a rank computes with JAX."""

from __future__ import annotations

import jax

from hvdtrain.tensors.jax import pin_device
from hvdtrain.topology import Topology
from hvdtrain.train.options import TrainOptions

__all__ = ["prepare"]


def prepare(topology: Topology, options: TrainOptions, most_threads: int) -> str:
    """Pin a device and name it; JAX takes no share of the cores (local)."""
    index = pin_device(topology, options.device)
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    (device, *_) = jax.local_devices()
    return device.platform if index is None else f"cuda:{index} ({device.device_kind})"
