"""MPI calls on GPU memory, where the library supports it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.mpi.flat import FlatMpi
from hvdtrain.types import ReduceOp

# Query functions of Open MPI, MPICH, MVAPICH and others.
_QUERIES = {
    "CUDA": ("MPIX_Query_cuda_support",),
    "ROCm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
}
# The query function of Cray's MPICH, and its arguments.
_GENERAL_QUERY = "MPIX_GPU_query_support"
_GENERAL_NUMBERS = {"CUDA": 0, "ROCm": 2}


def gpu_kinds(library: object) -> tuple[str, ...]:
    """Return the kinds of GPU ("CUDA", "ROCm") that an MPI library supports, after MPI_Init."""
    return tuple(kind for kind in _QUERIES if _takes(library, kind))


def _takes(library: object, kind: str) -> bool:
    for name in _QUERIES[kind]:
        query = getattr(library, name, None)
        if query is not None:
            return bool(query())
    general, answer = getattr(library, _GENERAL_QUERY, None), ctypes.c_int(0)
    if general is None:
        return False
    failed = general(ctypes.c_int(_GENERAL_NUMBERS[kind]), ctypes.byref(answer))
    return not failed and bool(answer.value)


def gpu_devices() -> frozenset[str]:
    """Return the loaded MPI's device types, by torch's names: AMD's GPUs are "cuda", too."""
    return frozenset({"cuda"} if gpu_kinds(ctypes.CDLL(MPI.__file__)) else ())


class GpuMpi(FlatMpi):
    """MPI calls on GPU memory, whose addresses are passed to MPI.

    MPI does not know streams and accesses memory immediately, so the host synchronizes with the
    calling thread's current stream before each call. This also covers memory that MPI writes:
    its previous user enqueued work on that stream. When a call returns, the result is complete.
    """

    # MPI splits buffers itself, and each call costs a synchronization with the GPU.
    most_reduced_bytes = 1 << 30

    def _settle(self, buffer: Buffer) -> None:
        kind = buffer.device.partition(":")[0]
        module: Any = getattr(sys.modules["torch"], kind)
        module.current_stream(buffer.device).synchronize()

    def allreduce(self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float) -> None:
        """Reduce in place, half types in float32 and rounded once."""
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
        """Reduce and keep one part, half types in float32 and rounded once."""
        wide, part = _wide(send), _wide(receive)
        super().reduce_scatter(wide, part, counts, op, prescale, postscale)
        _narrow(part, receive)


def _wide(buffer: Buffer) -> Buffer:
    """Return half types converted to float32, which MPI can reduce; other types unchanged."""
    if not buffer.dtype.is_half:
        return buffer
    tensor: Any = buffer.elements()
    return Buffer.of(tensor.float())


def _narrow(wide: Buffer, buffer: Buffer) -> None:
    if wide is not buffer:
        tensor: Any = buffer.elements()
        tensor.copy_(wide.elements())
