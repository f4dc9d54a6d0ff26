"""Where the buckets of parameters lie: on their device, where the engine reduces there. Local."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.engines.communicator import Capabilities
from hvdtrain.streams import HOST, Streams
from hvdtrain.torch.tensors.streams import streams_of

__all__ = ["places_of", "staged_in", "streams_by_type"]


def places_of(
    parameters: Sequence[torch.nn.Parameter], capabilities: Capabilities
) -> dict[str, str]:
    """Return, for each type of device that parameters are on, where their buckets lie.

    Host memory is the way for a device that the engine does not take, and for several devices of
    one type, between which buckets are not divided.
    """
    return {
        kind: str(*found) if kind in capabilities.devices and len(found) == 1 else "cpu"
        for kind, found in _devices(parameters).items()
    }


def streams_by_type(
    parameters: Sequence[torch.nn.Parameter], capabilities: Capabilities
) -> dict[str, Streams]:
    """Return, for each type of device, the order of work between it and its buckets.

    The host waits for each copy from one of several devices of a type.
    """
    return {
        kind: streams_of(next(iter(found)), capabilities) if len(found) == 1 else HOST
        for kind, found in _devices(parameters).items()
    }


def _devices(parameters: Sequence[torch.nn.Parameter]) -> dict[str, set[torch.device]]:
    devices: dict[str, set[torch.device]] = {}
    for parameter in parameters:
        devices.setdefault(parameter.device.type, set()).add(parameter.device)
    return devices


def staged_in(places: dict[str, str]) -> list[str]:
    """Return the types of devices whose gradients are copied through host memory."""
    return [kind for kind, place in places.items() if place == "cpu" and kind != "cpu"]
