"""MPI on memory of GPUs, where the library takes it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.mpi.flat import FlatMpi
from hvdtrain.engines.mpi.gpu_support import gpu_kinds
from hvdtrain.types import ReduceOp

__all__ = ["GpuMpi", "gpu_devices"]


def gpu_devices() -> frozenset[str]:
    """Return the types of device, by torch's names, whose memory the loaded MPI takes.

    PyTorch calls AMD's GPUs "cuda", too, and is built for one of the two.
    """
    return frozenset({"cuda"} if gpu_kinds(ctypes.CDLL(MPI.__file__)) else ())


class GpuMpi(FlatMpi):
    """Calls of MPI on memory of a GPU, whose addresses it gets as they are.

    MPI knows nothing of streams: it reads and writes at once, so the host waits before each call
    for what the calling thread has put on its current stream. That also covers memory that MPI is
    to write: whoever had it before has put his last work on that stream. When a call returns, the
    result is there.
    """

    # MPI cuts them itself; each call costs a wait for the GPU.
    most_reduced_bytes = 1 << 30

    def _settle(self, buffer: Buffer) -> None:
        kind = buffer.device.partition(":")[0]
        module: Any = getattr(sys.modules["torch"], kind)
        module.current_stream(buffer.device).synchronize()

    def allreduce(self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float) -> None:
        """Reduce in place; halves in float32, rounded once."""
        wide = _wide(buffer)
        super().allreduce(wide, op, prescale, postscale)
        _narrow(wide, buffer)

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce, and keep one part; halves in float32, rounded once."""
        wide, part = _wide(send), _wide(receive)
        super().reduce_scatter(wide, part, counts, op, prescale, postscale)
        _narrow(part, receive)


def _wide(buffer: Buffer) -> Buffer:
    """Return halves as float32, for which alone MPI has arithmetic; all else as it is."""
    if not buffer.dtype.is_half:
        return buffer
    tensor: Any = buffer.elements()
    return Buffer.of(tensor.float())


def _narrow(wide: Buffer, buffer: Buffer) -> None:
    if wide is not buffer:
        tensor: Any = buffer.elements()
        tensor.copy_(wide.elements())
