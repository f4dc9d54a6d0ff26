"""Engine mpi with memory of the tests' device, as with a GPU's where the MPI library takes it.

The library here takes none: it gets the addresses of what lies behind the device instead. All else
is the engine's own, and it must have waited for the device before it hands MPI an address.
"""

from typing import Any

import torch
from hidden_device import install, writes
from hidden_memory import DEVICE, elements_behind
from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.mpi import flat


class _Stream:
    """The device's only stream, which is not through before somebody waits for it."""

    def __init__(self) -> None:
        self.seen = 0

    def synchronize(self) -> None:
        self.seen = writes()


_stream = _Stream()


def let_mpi_take_the_device() -> None:
    """Have engine mpi of this process believe that MPI takes the device's memory."""
    install()
    module: Any = getattr(torch, DEVICE)
    module.current_stream = lambda device: _stream
    vars(flat)["gpu_devices"] = lambda: frozenset({DEVICE})
    vars(flat)["memory"] = _memory


def _memory(buffer: Buffer) -> MPI.buffer:
    address = buffer.pointer
    if buffer.device != "cpu":
        assert _stream.seen == writes(), f"MPI is given {buffer} while the device works on it"
        tensor = buffer.elements()
        assert isinstance(tensor, torch.Tensor), buffer
        address = elements_behind(tensor).data_ptr()
    return MPI.buffer.fromaddress(address, buffer.nbytes)
