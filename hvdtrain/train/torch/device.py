"""The device that a rank computes on with torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.devices import (
    Device,
    DeviceWish,
    device_index,
    no_gpus,
    thread_share,
    threads_set_by_user,
    threads_text,
)
from hvdtrain.topology import Topology
from hvdtrain.train.options import TrainOptions


def prepare(topology: Topology, options: TrainOptions) -> Device:
    """Pin a device or take a share of the cores, and return the device."""
    return describe_device(select_device(topology, options))


def select_device(topology: Topology, options: TrainOptions) -> torch.device:
    """Pin a device or take a share of the cores, and return the torch device."""
    device = pin_device(topology, options.device_wish)
    threads = thread_share(topology)
    if threads is not None:
        torch.set_num_threads(threads)
    return device


def pin_device(topology: Topology, wish: DeviceWish) -> torch.device:
    """Make this rank's GPU the current device, or return the CPU."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish.kind == "cpu" or (wish.kind == "auto" and visible == 0):
        return torch.device("cpu")
    if visible == 0:
        raise no_gpus("torch", os.environ)
    device = torch.device("cuda", device_index(topology, visible, wish))
    torch.cuda.set_device(device)
    return device


def limit_threads(most: int) -> None:
    """Limit the number of threads, unless the user has set it."""
    if not threads_set_by_user() and torch.get_num_threads() > most:
        torch.set_num_threads(most)


def describe_device(device: torch.device) -> Device:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(f"{device} ({properties.name})", str(properties.uuid))
    return Device(threads_text(torch.get_num_threads()))


def move_to(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move tensors in nested containers to a device, floating-point ones converted to one type."""
    if isinstance(value, torch.Tensor):
        kind = dtype if value.is_floating_point() else value.dtype
        return value.to(device, kind, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: move_to(item, device, dtype) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [move_to(item, device, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
