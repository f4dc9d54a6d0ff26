"""MPI itself: its communicators, and collectives without a hierarchy, on host and GPU memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.float_order import from_ordered, is_ordered, to_ordered
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:
    from hvdtrain.engines.mpi.failures import MpiFailures

# Arithmetic for half types and bool differs between MPI libraries.
MPI_TYPES: dict[DType, MPI.Datatype] = {
    DType.UINT8: MPI.UINT8_T,
    DType.UINT16: MPI.UINT16_T,
    DType.UINT32: MPI.UINT32_T,
    DType.UINT64: MPI.UINT64_T,
    DType.INT8: MPI.INT8_T,
    DType.INT16: MPI.INT16_T,
    DType.INT32: MPI.INT32_T,
    DType.INT64: MPI.INT64_T,
    DType.FLOAT32: MPI.FLOAT,
    DType.FLOAT64: MPI.DOUBLE,
    DType.COMPLEX64: MPI.C_FLOAT_COMPLEX,
    DType.COMPLEX128: MPI.C_DOUBLE_COMPLEX,
}

MPI_OPS: dict[ReduceOp, MPI.Op] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}


def memory(buffer: Buffer) -> MPI.buffer:
    """Return the memory of a buffer as MPI's buffer object."""
    return MPI.buffer.fromaddress(buffer.pointer, buffer.nbytes)


def typed(buffer: Buffer) -> list[object]:
    """Return the [memory, count, datatype] of a buffer for a reduction."""
    return [memory(buffer), buffer.count, MPI_TYPES[buffer.dtype]]


# MPI_FT of Open MPI's mpi.h, a key that mpi4py does not name.
_FAULT_TOLERANT = 12


def tolerates_failures() -> bool:
    """Return whether ranks can continue when another ends, as under mpirun --with-ft ulfm."""
    name, version = MPI.get_vendor()
    if name != "Open MPI" or version < (5,):
        return False
    address = MPI.COMM_WORLD.Get_attr(_FAULT_TOLERANT)
    return isinstance(address, int) and ctypes.c_int.from_address(address).value != 0


@collective
def split_comm(
    failures: MpiFailures | None, comm: MPI.Intracomm, color: int, key: int
) -> MPI.Intracomm:
    """Split a communicator, in the way that suits the world."""
    if failures is None:
        return cast("MPI.Intracomm", comm.Split(color, key))
    return failures.split(comm, color, key)


@collective
def duplicate_comm(failures: MpiFailures | None, comm: MPI.Intracomm) -> MPI.Intracomm:
    """Duplicate a communicator, in the way that suits the world."""
    return comm.Dup() if failures is None else failures.duplicate(comm)


@collective
def free_comm(failures: MpiFailures | None, comm: MPI.Comm) -> None:
    """Free a communicator that is not null, in the way that suits the world."""
    if comm == MPI.COMM_NULL:
        return
    if failures is None:
        comm.Free()
    else:
        failures.free(comm)


class FlatMpi:
    """MPI calls on host memory; the methods are those of Communicator."""

    # Open MPI's Allreduce loses three quarters of its speed above the size of the caches.
    most_reduced_bytes = 4 << 20

    def __init__(self, comm: MPI.Intracomm, chunk_bytes: int) -> None:
        self._comm = comm
        self._chunk_bytes = chunk_bytes
        self._reduce_bytes = min(self.most_reduced_bytes, chunk_bytes)

    def _settle(self, buffer: Buffer) -> None:
        """Wait for the calling thread's work on the buffer's device; host memory needs no wait."""

    def allreduce(self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float) -> None:
        for piece in buffer.pieces(self._reduce_bytes):
            piece.scale(prescale)
            ordered = to_ordered(piece, op)
            self._settle(ordered)
            self._comm.Allreduce(MPI.IN_PLACE, typed(ordered), op=MPI_OPS[op])
            from_ordered(ordered, piece)
            piece.scale(postscale)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        self._settle(buffer)
        for piece in buffer.pieces(self._chunk_bytes):
            self._comm.Bcast(_bytes(piece), root_rank)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        self._settle(send)
        sizes = [count * send.dtype.itemsize for count in counts]
        gathered = [memory(receive), sizes, _starts(sizes), MPI.BYTE]
        self._comm.Allgatherv(_bytes(send), gathered)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        # Totals differ between ranks, which must all use the same algorithm: pairwise, in pieces.
        self._settle(send)
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        send_starts, receive_starts = _starts(send_counts), _starts(receive_counts)
        for step in range(size):
            target, source = (rank + step) % size, (rank - step) % size
            outgoing = send.slice(send_starts[target], send_counts[target])
            incoming = receive.slice(receive_starts[source], receive_counts[source])
            self._exchange(outgoing, target, incoming, source)

    def _exchange(self, outgoing: Buffer, target: int, incoming: Buffer, source: int) -> None:
        requests = [
            self._comm.Irecv(_bytes(piece), source) for piece in incoming.pieces(self._chunk_bytes)
        ]
        requests += [
            self._comm.Isend(_bytes(piece), target) for piece in outgoing.pieces(self._chunk_bytes)
        ]
        MPI.Request.Waitall(requests)

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        if prescale != 1.0 or is_ordered(send.dtype, op):
            own = send.like(send.count)
            own.copy_from(send)
            own.scale(prescale)
            send = to_ordered(own, op)
        part = receive.view(send.dtype)
        self._settle(send)
        if send.nbytes > self._chunk_bytes:
            self._reduce_scatter_by_reductions(send, part, counts, op)
        else:
            self._comm.Reduce_scatter(typed(send), typed(part), counts, op=MPI_OPS[op])
        from_ordered(part, receive)
        receive.scale(postscale)

    def _reduce_scatter_by_reductions(
        self, send: Buffer, receive: Buffer, counts: Sequence[int], op: ReduceOp
    ) -> None:
        rank = self._comm.Get_rank()
        for root_rank, start in enumerate(_starts(counts)):
            part = send.slice(start, counts[root_rank])
            results = receive.pieces(self._reduce_bytes)
            for piece in part.pieces(self._reduce_bytes):
                result = typed(next(results)) if root_rank == rank else None
                self._comm.Reduce(typed(piece), result, MPI_OPS[op], root_rank)


def _bytes(buffer: Buffer) -> list[object]:
    return [memory(buffer), buffer.nbytes, MPI.BYTE]


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


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
