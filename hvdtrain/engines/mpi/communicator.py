"""The communicator of the mpi engine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from mpi4py import MPI

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import (
    COMPLEX,
    Capabilities,
    Communicator,
    Pending,
    PointToPoint,
    Slices,
    VotedReduction,
)
from hvdtrain.engines.mpi.flat import (
    MPI_OPS,
    MPI_TYPES,
    FlatMpi,
    GpuMpi,
    duplicate_comm,
    free_comm,
    memory,
)
from hvdtrain.engines.mpi.hierarchy import NodeHierarchy, NodeSlices, open_hierarchy
from hvdtrain.engines.shared_memory.node_group import NodeGroup, NodeVotedReduction, open_node_group
from hvdtrain.errors import SystemLimitError
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:
    from hvdtrain.engines.mpi.failures import MpiFailures


class MpiPointToPoint(PointToPoint):
    def __init__(self, failures: MpiFailures | None, comm: MPI.Intracomm, chunk_bytes: int) -> None:
        self._failures = failures
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

    @collective
    def close(self) -> None:
        free_comm(self._failures, self._comm)


class _Requests(Pending):
    def __init__(self, requests: Sequence[MPI.Request], memory: object) -> None:
        self._requests = list(requests)
        self._memory = memory  # MPI uses it until the requests are complete

    def test(self) -> bool:
        return MPI.Request.Testall(self._requests)


# Up to this size of a rank's piece shared memory is used to gather: MPI would spin until all ranks
# have arrived.
_GATHER_BYTES = 64 << 10

_HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
_REDUCES = {
    op: frozenset(MPI_TYPES) - (COMPLEX if op in (ReduceOp.MIN, ReduceOp.MAX) else set())
    for op in MPI_OPS
}


class MpiCommunicator(Communicator):
    """A communicator on its own MPI communicator, separate from the user's messages."""

    @collective
    def __init__(
        self,
        comm: MPI.Intracomm,
        chunk_bytes: int,
        nodes: Sequence[int] | None = None,
        kernel: ctypes.CDLL | None = None,
        gpus: frozenset[str] = frozenset(),
        failures: MpiFailures | None = None,
    ) -> None:
        self._comm, self._failures = comm, failures
        self._chunk_bytes = chunk_bytes
        self._host, self._gpu = FlatMpi(comm, chunk_bytes), GpuMpi(comm, chunk_bytes)
        self._gpus = gpus
        self._nodes, self._kernel = nodes, kernel
        self._node_group: NodeGroup | None = None
        self._hierarchy: NodeHierarchy | None = None
        try:
            self._share_memory()
        except SystemLimitError:  # on every member
            free_comm(failures, comm)
            raise
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        # MPI has no arithmetic for half types, which between nodes would be rounded twice.
        half_types = self._node_group is not None
        self.capabilities = Capabilities(
            reduces={
                op: types | (_HALVES if half_types else set()) for op, types in _REDUCES.items()
            },
            moves=frozenset(DType),
            devices=frozenset({"cpu"}) | gpus,
            concurrent=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            half_types=half_types,
            tree_sums=self._node_group is not None,
            point_to_point=True,
        )

    @collective
    def _share_memory(self) -> None:
        comm, nodes, kernel, failures = self._comm, self._nodes, self._kernel, self._failures
        if nodes is None or len(nodes) == 1:
            return
        if len(set(nodes)) == 1 and kernel is not None:
            terms = kernel, comm.Get_rank(), comm.Get_size(), comm.allgather
            if failures is None:
                # Any MPI call detects that mpirun has ended.
                self._node_group = open_node_group(*terms, comm.Iprobe)
            else:
                self._node_group = open_node_group(*terms, failures.check, failures.check_seconds)
        else:
            self._hierarchy = open_hierarchy(comm, nodes, kernel, failures)

    def start_max(self, values: np.typing.NDArray[np.uint64]) -> Pending:
        if self._node_group is not None:
            return self._node_group.start_max(values)
        request = self._comm.Iallreduce(MPI.IN_PLACE, [values, MPI.UINT64_T], op=MPI.MAX)
        return _Requests([request], values)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        if buffer.device != "cpu":
            self._gpu.allreduce(buffer, op, prescale, postscale)
            return
        if prescale != 1.0 or postscale != 1.0:
            buffer = self.native(buffer)
        separately = buffer.dtype.is_integer  # factors truncate integers
        if separately:
            buffer.scale(prescale)
        factors = (1.0, 1.0) if separately else (prescale, postscale)
        if self._node_group is not None:
            self._node_group.allreduce(buffer, buffer, op, *factors)
        elif (
            self._hierarchy is None
            or buffer.nbytes < self._hierarchy.least_bytes
            or not self._hierarchy.allreduce(buffer, op, *factors)
        ):
            self._host.allreduce(buffer, op, *factors)
        if separately:
            buffer.scale(postscale)

    def allreduce_from(
        self,
        source: Buffer,
        buffer: Buffer,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        if self._node_group is None or buffer.dtype.is_integer or buffer.device != "cpu":
            super().allreduce_from(source, buffer, op, prescale, postscale)
        else:
            self._node_group.allreduce(source, buffer, op, prescale, postscale)

    def voted_reduction(
        self, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> VotedReduction | None:
        # Factors truncate integers, so they are applied before and after the sum.
        separate = dtype.is_integer and (prescale, postscale) != (1.0, 1.0)
        if self._node_group is None or separate:
            return None
        return NodeVotedReduction(self._node_group, dtype, op, prescale, postscale)

    def _mpi_for(self, buffer: Buffer) -> FlatMpi:
        return self._host if buffer.device == "cpu" else self._gpu

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        self._mpi_for(buffer).broadcast(buffer, root_rank)

    @collective
    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        if receive.nbytes > self._chunk_bytes:
            self._allgather_by_broadcasts(send, receive, counts)
            return
        largest = max(counts) * send.dtype.itemsize
        if self._node_group is None or largest > _GATHER_BYTES or receive.device != "cpu":
            self._mpi_for(receive).allgather(send, receive, counts)
        else:
            self._node_group.allgather(send, receive, counts)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        self._mpi_for(receive).alltoall(send, receive, send_counts, receive_counts)

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        if receive.device != "cpu":
            self._gpu.reduce_scatter(send, receive, counts, op, prescale, postscale)
        elif self._node_group is not None and send.dtype.is_half:
            super().reduce_scatter(send, receive, counts, op, prescale, postscale)
        else:
            send, receive = self.native(send), self.native(receive)
            self._host.reduce_scatter(send, receive, counts, op, prescale, postscale)

    def barrier(self) -> None:
        self._comm.Barrier()

    @collective
    def split(self, ranks: Sequence[int]) -> MpiCommunicator | None:
        member = self.rank in ranks
        if self._failures is None:
            # All know the ranks, which MPI_Comm_split would gather from all.
            whole = self._comm.Get_group()
            group = whole.Incl(ranks)
            comm = cast("MPI.Intracomm", self._comm.Create(group))
            group.Free()
            whole.Free()
        elif list(ranks) == list(range(self.size)):
            comm = self._failures.duplicate(self._comm)
        else:
            key = list(ranks).index(self.rank) if member else 0
            comm = self._failures.split(self._comm, 0 if member else MPI.UNDEFINED, key)
        if not member:
            return None
        nodes = None if self._nodes is None else [self._nodes[rank] for rank in ranks]
        return MpiCommunicator(
            comm, self._chunk_bytes, nodes, self._kernel, self._gpus, self._failures
        )

    @collective
    def point_to_point(self) -> MpiPointToPoint:
        comm = duplicate_comm(self._failures, self._comm)
        return MpiPointToPoint(self._failures, comm, self._chunk_bytes)

    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        shared = self._hierarchy if self._node_group is None else self._node_group.arena
        memory = shared.empty(nbytes) if shared is not None and device == "cpu" else None
        return super().empty(nbytes, device) if memory is None else memory

    def slices(self) -> Slices | None:
        if self._node_group is not None:
            return NodeSlices(self._node_group, self.rank, self.size, None, 1)
        return None if self._hierarchy is None else self._hierarchy.slices()

    def put(self, source: Buffer, buffer: Buffer) -> None:
        if self._kernel is None:
            super().put(source, buffer)
        else:
            self._kernel.hvd_copy(buffer.pointer, source.pointer, source.nbytes)

    def confirm(self) -> None:
        # What is summed in the memory of one node is complete or fails.
        if self._failures is not None and self._node_group is None:
            self._failures.confirm(self._comm)

    def explained(self, error: BaseException) -> BaseException:
        return error if self._failures is None else self._failures.explained(error)

    @collective
    def close(self) -> None:
        for shared in (self._node_group, self._hierarchy):
            if shared is not None:
                shared.close()
        self._node_group = self._hierarchy = None
        free_comm(self._failures, self._comm)

    def abort(self, code: int) -> None:
        if self._failures is not None and self._failures.notice is not None:
            self._failures.notice.give(code)
        MPI.COMM_WORLD.Abort(code)
        # MPICH may return before its launcher has ended this process, which would then leave the
        # job as at its usual end, and tell other ranks so.
        os._exit(code)
