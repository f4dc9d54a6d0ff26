"""Where a rank computes with torch."""

from __future__ import annotations

import torch

from hvdtrain.devices import Device
from hvdtrain.tensors.torch import pin_device
from hvdtrain.topology import Topology
from hvdtrain.train.frameworks.threads import share_of_threads, threads_text
from hvdtrain.train.options import TrainOptions

__all__ = ["prepare", "take_device"]


def prepare(topology: Topology, options: TrainOptions, most_threads: int) -> Device:
    """Pin a device or take a share of the cores; tell which device (local)."""
    return take_device(topology, options, most_threads)[1]


def take_device(
    topology: Topology, options: TrainOptions, most_threads: int
) -> tuple[torch.device, Device]:
    """Pin a device or take a share of the cores; return the device, and what it is (local).

    Raises:
        UsageError: there is no such device.
    """
    device = pin_device(topology, options.device_wish)
    threads = share_of_threads(topology, most_threads)
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return device, Device(f"{device} ({properties.name})", str(properties.uuid))
    return device, Device(threads_text(torch.get_num_threads()))
