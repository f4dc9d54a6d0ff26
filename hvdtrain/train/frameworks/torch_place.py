"""Where a rank computes with torch."""

from __future__ import annotations

import torch

from hvdtrain.tensors.torch import pin_device
from hvdtrain.topology import Topology
from hvdtrain.train.frameworks.threads import share_of_threads, threads_text
from hvdtrain.train.options import TrainOptions

__all__ = ["prepare", "take_device"]


def prepare(topology: Topology, options: TrainOptions, most_threads: int) -> str:
    """Pin a device or take a share of the cores; name the device (local)."""
    return take_device(topology, options, most_threads)[1]


def take_device(
    topology: Topology, options: TrainOptions, most_threads: int
) -> tuple[torch.device, str]:
    """Pin a device or take a share of the cores; return the device and its name (local).

    Raises:
        UsageError: there is no such device.
    """
    device = pin_device(topology, options.device)
    threads = share_of_threads(topology, most_threads)
    if threads is not None:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        return device, f"{device} ({torch.cuda.get_device_name(device)})"
    return device, threads_text(torch.get_num_threads())
