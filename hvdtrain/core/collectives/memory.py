"""Allocation of communicator memory, which is collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core.agreement.operation import Operation, Request
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp


def device_types(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    """Return the type of each buffer's device, e.g. "cuda" for "cuda:1"."""
    return tuple(buffer.device.partition(":")[0] for buffer in buffers)


def device_details(devices: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the details of a request about devices; empty if all buffers are in host memory.

    Engines communicate each kind of memory differently: a member with a tensor on the CPU and one
    with a tensor on a GPU would wait for each other forever.
    """
    if all(device == "cpu" for device in devices):
        return ()
    return (("device", ", ".join(devices)),)


class AllocateMemory(Operation):
    """Allocate memory that the communicator reduces fastest; the result is 1-d uint8 memory."""

    def __init__(self, nbytes: int, name: str, device: str = "cpu") -> None:
        super().__init__()
        self._size, self._device = nbytes, device
        kind = device.partition(":")[0]
        self.request = Request("memory", name, (("bytes", str(nbytes)), *device_details([kind])))

    def execute(self, communicator: Communicator) -> Elements:
        return communicator.empty(self._size, self._device)


class AllocateIfWanted(Operation):
    """Allocate such memory if all members want it; otherwise the result is None."""

    def __init__(self, nbytes: int, name: str, wanted: bool) -> None:
        super().__init__()
        self._size, self._wanted = nbytes, wanted
        self.request = Request("memory if wanted", name, (("bytes", str(nbytes)),))

    def execute(self, communicator: Communicator) -> Elements | None:
        wanted = np.array([self._wanted], np.int32)
        communicator.allreduce(Buffer.from_array(wanted), ReduceOp.MIN)
        return communicator.empty(self._size) if wanted[0] else None
