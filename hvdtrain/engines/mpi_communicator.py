"""The communicator of the mpi engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Capabilities, Communicator, Pending
from hvdtrain.engines.mpi_nodes import NodeHierarchy, open_hierarchy
from hvdtrain.engines.mpi_types import MPI_OPS, MPI_TYPES, memory, typed
from hvdtrain.engines.node_team import NodeTeam, open_team
from hvdtrain.types import DType, ReduceOp

__all__ = ["MpiCommunicator"]

# Open MPI's Allreduce loses three quarters of its speed above the size of the caches.
_REDUCE_BYTES = 4 << 20

# So much is gathered in shared memory in one turn; MPI would spin on a core until all are there.
_GATHER_BYTES = 64 << 10

_HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
_COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
_REAL = frozenset(MPI_TYPES) - _COMPLEX
_REDUCES = {
    ReduceOp.SUM: _REAL | _COMPLEX,
    ReduceOp.MIN: _REAL,
    ReduceOp.MAX: _REAL,
    ReduceOp.PRODUCT: _REAL | _COMPLEX,
}


class MpiCommunicator(Communicator):
    """An MPI communicator of its own, so that no message of the user's can be mistaken for ours.

    Args:
        comm: a communicator that nobody else uses; `close` frees it.
        chunk_bytes: the most bytes in one call that moves data (MPI counts end at 2^31).
        nodes: for each rank a number that is equal for ranks that share memory; None where they
            are not to reduce in it.
        kernel: of load_kernel(), on every rank; None on all of them to add with numpy.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        chunk_bytes: int,
        nodes: Sequence[int] | None = None,
        kernel: ctypes.CDLL | None = None,
    ) -> None:
        self._comm = comm
        self._chunk_bytes = chunk_bytes
        self._nodes, self._kernel = nodes, kernel
        self._team: NodeTeam | None = None
        self._hierarchy: NodeHierarchy | None = None
        if nodes is not None and len(nodes) > 1:
            if len(set(nodes)) == 1 and kernel is not None:
                # MPI finds out in any of its calls that mpirun has gone.
                self._team = open_team(kernel, comm.Get_rank(), comm.allgather, comm.Iprobe)
            else:
                self._hierarchy = open_hierarchy(comm, nodes, kernel)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        # MPI has no arithmetic for half types, and between nodes they would be rounded twice.
        halves = self._team is not None
        self.capabilities = Capabilities(
            reduces={op: types | (_HALVES if halves else set()) for op, types in _REDUCES.items()},
            moves=frozenset(DType),
            devices=frozenset({"cpu"}),
            concurrent=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            halves=halves,
            trees=self._team is not None,
        )

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        if self._team is not None:
            return self._team.start_max(values)
        request = self._comm.Iallreduce(MPI.IN_PLACE, [values, MPI.UINT64_T], op=MPI.MAX)
        return _MpiPending(request, values)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        by_itself = buffer.dtype.is_integer  # whose factors truncate
        if by_itself:
            buffer.scale(prescale)
        factors = (1.0, 1.0) if by_itself else (prescale, postscale)
        if self._team is not None:
            self._team.allreduce(buffer, buffer, op, *factors)
        elif self._hierarchy is not None and buffer.nbytes >= self._hierarchy.least_bytes:
            self._hierarchy.allreduce(buffer, op, *factors)
        else:
            self._allreduce_flat(buffer, op, *factors)
        if by_itself:
            buffer.scale(postscale)

    def allreduce_from(
        self,
        source: Buffer,
        buffer: Buffer,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        if self._team is None or buffer.dtype.is_integer:
            super().allreduce_from(source, buffer, op, prescale, postscale)
        else:
            self._team.allreduce(source, buffer, op, prescale, postscale)

    def _allreduce_flat(
        self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        for piece in buffer.pieces(min(_REDUCE_BYTES, self._chunk_bytes)):
            piece.scale(prescale)
            self._comm.Allreduce(MPI.IN_PLACE, typed(piece), op=MPI_OPS[op])
            piece.scale(postscale)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        for piece in buffer.pieces(self._chunk_bytes):
            self._comm.Bcast(_bytes(piece), root_rank)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        if receive.nbytes > self._chunk_bytes:
            self._allgather_by_broadcasts(send, receive, counts)
            return
        itemsize = send.dtype.itemsize
        if self._team is not None and receive.nbytes <= _GATHER_BYTES:
            whole = Buffer(receive.pointer, DType.UINT8, receive.nbytes, owner=receive)
            whole.array()[:] = 0
            start = itemsize * sum(counts[: self.rank])
            ctypes.memmove(receive.pointer + start, send.pointer, send.nbytes)
            self._team.allreduce(whole, whole, ReduceOp.SUM, 1.0, 1.0)
            return
        sizes = [count * itemsize for count in counts]
        self._comm.Allgatherv(_bytes(send), [memory(receive), sizes, _starts(sizes), MPI.BYTE])

    def _allgather_by_broadcasts(
        self, send: Buffer, receive: Buffer, counts: Sequence[int]
    ) -> None:
        for root_rank, start in enumerate(_starts(counts)):
            part = receive.slice(start, counts[root_rank])
            if root_rank == self.rank:
                part.array()[:] = send.array()
            self.broadcast(part, root_rank)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        # Ranks see different totals, but they must take the same path: pairs, in pieces.
        send_starts, receive_starts = _starts(send_counts), _starts(receive_counts)
        for step in range(self.size):
            target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
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
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        if self._team is not None and send.dtype.is_half:
            whole = Buffer.from_array(np.empty(send.count, send.dtype.numpy), send.dtype)
            self._team.allreduce(send, whole, op, prescale, postscale)
            start = sum(counts[: self.rank])
            receive.array()[:] = whole.slice(start, receive.count).array()
            return
        if prescale != 1.0:
            send = Buffer.from_array(send.array().copy(), send.dtype)
            send.scale(prescale)
        if send.nbytes > self._chunk_bytes:
            self._reduce_scatter_by_reductions(send, receive, counts, op)
        else:
            self._comm.Reduce_scatter(typed(send), typed(receive), counts, op=MPI_OPS[op])
        receive.scale(postscale)

    def _reduce_scatter_by_reductions(
        self, send: Buffer, receive: Buffer, counts: Sequence[int], op: ReduceOp
    ) -> None:
        for root_rank, start in enumerate(_starts(counts)):
            part = send.slice(start, counts[root_rank])
            results = receive.pieces(_REDUCE_BYTES)
            for piece in part.pieces(_REDUCE_BYTES):
                result = typed(next(results)) if root_rank == self.rank else None
                self._comm.Reduce(typed(piece), result, MPI_OPS[op], root_rank)

    def barrier(self) -> None:
        self._comm.Barrier()

    def split(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        member = self.rank in ranks
        color = 0 if member else MPI.UNDEFINED
        comm = self._comm.Split(color, list(ranks).index(self.rank) if member else 0)
        if not member:
            return None
        nodes = None if self._nodes is None else [self._nodes[rank] for rank in ranks]
        return MpiCommunicator(MPI.Intracomm(comm), self._chunk_bytes, nodes, self._kernel)

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        shared = self._hierarchy if self._team is None else self._team.arena
        memory = shared.empty(nbytes) if shared is not None else None
        return np.empty(nbytes, np.uint8) if memory is None else memory

    def put(self, source: Buffer, buffer: Buffer) -> None:
        if self._kernel is None:
            super().put(source, buffer)
        else:
            self._kernel.hvd_copy(buffer.pointer, source.pointer, source.nbytes)

    def close(self) -> None:
        for shared in (self._team, self._hierarchy):
            if shared is not None:
                shared.close()
        self._team = self._hierarchy = None
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()

    def abort(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)


class _MpiPending(Pending):
    def __init__(self, request: MPI.Request, values: npt.NDArray[np.uint64]) -> None:
        self._request = request
        self._values = values  # MPI writes into it until the request is complete

    def test(self) -> bool:
        return bool(self._request.Test())


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _bytes(buffer: Buffer) -> list[object]:
    return [memory(buffer), buffer.nbytes, MPI.BYTE]
