"""The device types of an operation's buffers, which must be equal on all members."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.buffer import Buffer


def device_types(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    """Return the type of each buffer's device, e.g. "cuda" for "cuda:1"."""
    return tuple(buffer.device.partition(":")[0] for buffer in buffers)


def device_details(devices: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the details of a request about devices; empty if all buffers are in host memory.

    Engines communicate each kind of memory differently: a member with a tensor on the CPU and one
    with a tensor on a GPU would wait for each other for ever.
    """
    if all(device == "cpu" for device in devices):
        return ()
    return (("device", ", ".join(devices)),)
