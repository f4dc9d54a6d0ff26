"""The device of a rank: which GPU it uses, and page-locked host memory for copies to it."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.devices import DeviceWish, device_index, no_gpus
from hvdtrain.topology import Topology


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


def page_lock(memory: Elements, channel: Channel) -> None:
    """Page-lock host memory of a channel, so that copies between it and a GPU are asynchronous.

    Where the system refuses, copies still work, but the host waits for each of them. The memory is
    unlocked before the channel is closed.
    """
    buffer = Buffer.of(memory)
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(buffer.pointer, buffer.nbytes, 0)) == 0:
        channel.before_closing(partial(runtime.cudaHostUnregister, buffer.pointer))
        return
    with suppress(RuntimeError):  # the next call of PyTorch would report this error as its own
        torch.zeros(1, device="cuda")
