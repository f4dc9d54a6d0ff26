"""The device that a rank computes on with JAX."""

from __future__ import annotations

import jax

from hvdtrain.devices import Device
from hvdtrain.keras.tensors.device import pin_device
from hvdtrain.topology import Topology
from hvdtrain.train.options import TrainOptions


def prepare(topology: Topology, options: TrainOptions) -> Device:
    """Pin a device and return it; JAX cannot be limited to a share of the cores."""
    index = pin_device(topology, options.device_wish)
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    (device, *_) = jax.local_devices()
    return Device(device.platform if index is None else f"cuda:{index} ({device.device_kind})")
