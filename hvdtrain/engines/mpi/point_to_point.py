"""Messages between pairs of ranks over MPI."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.mpi.failures import free_comm
from hvdtrain.engines.mpi.types import memory
from hvdtrain.engines.point_to_point import Pending, PointToPoint


class MpiPointToPoint(PointToPoint):
    """Messages on an MPI communicator."""

    def __init__(self, comm: MPI.Intracomm, chunk_bytes: int) -> None:
        self._comm, self._chunk_bytes = comm, chunk_bytes

    def start_send(self, buffer: Buffer, rank: int, tag: int) -> Pending:
        pieces = buffer.pieces(self._chunk_bytes)
        return _Requests([self._comm.Isend(memory(piece), rank, tag) for piece in pieces], buffer)

    def start_receive(self, buffer: Buffer, rank: int, tag: int) -> Pending:
        pieces = buffer.pieces(self._chunk_bytes)
        return _Requests([self._comm.Irecv(memory(piece), rank, tag) for piece in pieces], buffer)

    def waiting(self, tag: int) -> int | None:
        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            return None
        return status.Get_source()

    def close(self) -> None:
        if self._comm != MPI.COMM_NULL:
            free_comm(self._comm)


class _Requests(Pending):
    def __init__(self, requests: Sequence[MPI.Request], buffer: Buffer) -> None:
        self._requests = list(requests)
        self._buffer = buffer  # MPI uses it until the requests are complete

    def test(self) -> bool:
        return MPI.Request.Testall(self._requests)
