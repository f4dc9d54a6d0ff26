"""Collectives of MPI itself, without a hierarchy of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.float_order import from_ordered, is_ordered, to_ordered
from hvdtrain.types import DType, ReduceOp

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
        if receive.nbytes > self._chunk_bytes:
            self._allgather_by_broadcasts(send, receive, counts)
            return
        self._settle(send)
        sizes = [count * send.dtype.itemsize for count in counts]
        gathered = [memory(receive), sizes, _starts(sizes), MPI.BYTE]
        self._comm.Allgatherv(_bytes(send), gathered)

    def _allgather_by_broadcasts(
        self, send: Buffer, receive: Buffer, counts: Sequence[int]
    ) -> None:
        rank = self._comm.Get_rank()
        for root_rank, start in enumerate(_starts(counts)):
            part = receive.slice(start, counts[root_rank])
            if root_rank == rank:
                part.copy_from(send)
            self.broadcast(part, root_rank)

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
