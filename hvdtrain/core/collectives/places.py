"""Where the buffers of an operation lie, which all members must have alike."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.buffer import Buffer

__all__ = ["device_details", "device_types"]


def device_types(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    """Return for each buffer the type of its device, as "cuda", whatever number it has."""
    return tuple(buffer.device.partition(":")[0] for buffer in buffers)


def device_details(devices: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return what a request says of devices: nothing where all is in host memory.

    An engine moves each kind of memory in another way: a member with a tensor on the CPU and one
    with a tensor on a GPU would wait for each other for ever.
    """
    if all(device == "cpu" for device in devices):
        return ()
    return (("device", ", ".join(devices)),)
