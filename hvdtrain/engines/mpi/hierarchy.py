"""Hierarchical allreduce: in shared memory within nodes, over MPI between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from mpi4py import MPI

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import Slices, aligned_bounds, poll_until
from hvdtrain.engines.float_order import from_ordered, to_ordered
from hvdtrain.engines.mpi.flat import MPI_OPS, free_comm, split_comm, typed
from hvdtrain.engines.shared_memory.memory import (
    NodeArena,
    SystemFailure,
    agree_on_failure,
    share_memory,
)
from hvdtrain.engines.shared_memory.node_group import NodeGroup, open_node_group
from hvdtrain.errors import SystemLimitError
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:
    from hvdtrain.engines.mpi.failures import MpiFailures

_FOLDS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


class NumpyNodeGroup:
    """The two phases of a reduction in shared memory, as in NodeGroup, in rank order.

    Each phase is a few numpy calls on whole slices: after each call the thread must reacquire the
    GIL, which is expensive while the main thread is busy.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._rank = comm, comm.Get_rank()
        self.arena = NodeArena(self._rank, comm.Get_size(), comm.allgather)

    @np.errstate(all="ignore")  # as in MPI and C; loss scalers check for overflow
    @collective
    def add(
        self, buffer: Buffer, op: ReduceOp, prescale: float, owners: int, postscale: float = 1.0
    ) -> Buffer:
        buffer.scale(prescale)
        self.meet()
        own = self._own_slice(buffer, owners)
        if own.count:
            slices = self._slices(own)
            # The first rank's copy holds the partial result until this rank's own is included.
            total = slices[0]
            for rank, part in enumerate(slices[1:], start=1):
                target = slices[self._rank] if rank >= self._rank else slices[0]
                _FOLDS[op](total, part, out=target)
                total = target
            own.scale(postscale)
        return own

    @collective
    def spread(self, buffer: Buffer, postscale: float, owners: int) -> None:
        own = self._own_slice(buffer, owners)
        if own.count:
            own.scale(postscale)
            for rank, part in enumerate(self._slices(own)):
                if rank != self._rank:
                    part[:] = own.array()
        self.meet()

    @collective
    def meet(self) -> None:
        # MPI_Barrier would keep a core busy while waiting for a late rank.
        poll_until(self._comm.Ibarrier().Test)

    def close(self) -> None:
        self.arena.close()

    def _own_slice(self, buffer: Buffer, owners: int) -> Buffer:
        if self._rank >= owners:
            return buffer.slice(buffer.count, 0)
        start, end = aligned_bounds(buffer.count, owners)[self._rank :][:2]
        return buffer.slice(start, end - start)

    def _slices(self, own: Buffer) -> list[np.typing.NDArray[Any]]:
        addresses = self.arena.addresses(self.arena.location(own))
        return [Buffer(address, own.dtype, own.count, owner=own).array() for address in addresses]


# As many bytes as one rank sends at a time in an all-reduce between nodes.
_PIECE_BYTES = 256 << 10


class NodeSlices(Slices):
    """Slices in the memory of a node group."""

    def __init__(
        self,
        group: NodeGroup | NumpyNodeGroup,
        number: int,
        owners: int,
        across: MPI.Comm | None,
        nodes: int,
    ) -> None:
        self._group, self._across = group, across
        self.number, self.owners, self.nodes = number, owners, nodes
        self.in_tree = isinstance(group, NodeGroup)
        self.adds_placed = self.in_tree and nodes == 1

    def copies(self, memory: Elements) -> list[np.typing.NDArray[np.uint8]] | None:
        return self._group.arena.copies(Buffer.of(memory))

    def reduce(self, buffer: Buffer, prescale: float, postscale: float) -> None:
        alone = self.nodes == 1
        own = self._group.add(
            buffer, ReduceOp.SUM, prescale, self.owners, postscale if alone else 1.0
        )
        if alone or self._across is None:
            return
        # With two at a time, the network is busy while one ends and the next begins.
        requests: list[MPI.Request] = []
        for piece in own.pieces(_PIECE_BYTES):
            requests.append(
                self._across.Iallreduce(MPI.IN_PLACE, typed(piece), op=MPI_OPS[ReduceOp.SUM])
            )
            if len(requests) > 1:
                poll_until(requests.pop(0).Test)
        for request in requests:
            poll_until(request.Test)
        own.scale(postscale)

    def add_placed(
        self,
        rows: np.typing.NDArray[np.uint64],
        dtype: DType,
        prescales: Sequence[float],
        postscale: float,
    ) -> None:
        assert isinstance(self._group, NodeGroup)
        self._group.add_placed(rows, dtype, prescales, postscale)

    def spread(self, buffer: Buffer) -> None:
        self._group.spread(buffer, 1.0, self.owners)

    def meet(self) -> None:
        self._group.meet()


_T = TypeVar("_T")
_AnyNodeGroup = NodeGroup | NumpyNodeGroup

# Bytes that one rank sends at a time: two pieces of 256 KiB saturate a link of 1 Gbit/s, two of
# 1 MiB only two thirds of it.
# Data outside shared memory is copied through it in chunks of this size.
_SCRATCH_BYTES = 4 << 20

# A single MPI call is faster for smaller data, between nodes and within one.
_LEAST_BYTES_BETWEEN = 1 << 20
_LEAST_BYTES_WITHIN = 256 << 10


@collective
def open_hierarchy(
    comm: MPI.Intracomm,
    nodes: Sequence[int],
    kernel: ctypes.CDLL | None,
    failures: MpiFailures | None = None,
) -> NodeHierarchy | None:
    """Set up shared memory within each node."""
    counts = [list(nodes).count(node) for node in set(nodes)]
    if max(counts) == 1:
        return None
    rank = comm.Get_rank()
    local = split_comm(failures, comm, nodes[rank], rank)
    try:
        group = _agree(
            comm, lambda: _open_node(local, kernel, failures), lambda own: own and own.close()
        )
    except SystemLimitError:
        free_comm(failures, local)
        raise
    if group is None:
        free_comm(failures, local)
        return None
    owners = min(counts)
    index = local.Get_rank()
    color = index if index < owners else MPI.UNDEFINED
    across = split_comm(failures, comm, color, rank)
    return NodeHierarchy(comm, local, across, group, owners, len(counts), failures)


@collective
def _open_node(
    local: MPI.Comm, kernel: ctypes.CDLL | None, failures: MpiFailures | None
) -> _AnyNodeGroup | None:
    terms = local.Get_rank(), local.Get_size(), local.allgather
    if kernel is None:
        return None if share_memory(1, *terms) is None else NumpyNodeGroup(local)
    if failures is None:
        return open_node_group(kernel, *terms)
    # The rank for which this one waits may itself wait for one of another node that has ended.
    return open_node_group(kernel, *terms, failures.check, failures.check_seconds)


@collective
def _agree(comm: MPI.Comm, acquire: Callable[[], _T], release: Callable[[_T], object]) -> _T | None:
    """Return a resource if every rank acquires one that is not None, else None."""
    got, failure = None, SystemFailure()
    try:
        got = acquire()
    except SystemLimitError as error:
        failure = SystemFailure(str(error), str(error))
    results = comm.allgather((got is not None, failure))
    everywhere = all(has for has, _ in results)
    if got is not None and not everywhere:
        release(got)
    agree_on_failure(failure for _, failure in results)
    return got if everywhere else None


class NodeHierarchy:
    """The node groups of all nodes, connected by their slice owners.

    The first ranks of each node, as many as the smallest node has, own one slice each. An owner
    reduces its slice within the node, all-reduces it with the owners of the same slice on the
    other nodes, and writes the result into every copy on the node. So all owners use the network
    at the same time.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        local: MPI.Comm,
        across: MPI.Comm,
        group: _AnyNodeGroup,
        owners: int,
        nodes: int,
        failures: MpiFailures | None,
    ) -> None:
        self._comm, self._local, self._across = comm, local, across
        self._failures = failures
        self._group, self._owners, self._nodes = group, owners, nodes
        self._alone = local.Get_size() == comm.Get_size()
        self.least_bytes = _LEAST_BYTES_WITHIN if self._alone else _LEAST_BYTES_BETWEEN
        self._scratch: list[Buffer] | None = None

    @collective
    def allreduce(self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float) -> bool:
        shared_in_place = self._is_shared_everywhere(buffer)
        scratch = [] if shared_in_place else self._open_scratch()
        if not shared_in_place and not scratch:
            return False
        chunk_bytes = buffer.nbytes if self._alone else self._owners * _PIECE_BYTES
        if not shared_in_place:
            chunk_bytes = min(chunk_bytes, _SCRATCH_BYTES)
        previous: _Chunk | None = None
        for number, piece in enumerate(buffer.pieces(chunk_bytes)):
            shared = piece if shared_in_place else _copy_to(piece, scratch[number % 2])
            own = self._group.add(shared, op, prescale, self._owners)
            ordered = own if self._alone else to_ordered(own, op)
            chunk = _Chunk(piece, shared, own, ordered, self._start(ordered, op))
            if previous is not None:
                self._complete(previous, postscale)
            previous = chunk
        if previous is not None:
            self._complete(previous, postscale)
        return True

    def _is_shared_everywhere(self, buffer: Buffer) -> bool:
        """Return whether every rank's buffer is in shared memory, at the same location."""
        location = self._group.arena.location(buffer)
        lowest = np.array([location, -location], np.int64)
        self._comm.Allreduce(MPI.IN_PLACE, lowest, op=MPI.MIN)
        return bool(lowest[0] == -lowest[1] != 0)

    @collective
    def _open_scratch(self) -> list[Buffer]:
        """Return two alternating chunks of shared memory; [] if there are none."""
        if self._scratch is None:
            memory = self.empty(2 * _SCRATCH_BYTES)
            self._scratch = (
                [] if memory is None else [*Buffer.from_array(memory).pieces(_SCRATCH_BYTES)]
            )
        return self._scratch

    def _start(self, own: Buffer, op: ReduceOp) -> MPI.Request:
        if own.count == 0 or self._alone:
            return MPI.REQUEST_NULL
        return self._across.Iallreduce(MPI.IN_PLACE, typed(own), op=MPI_OPS[op])

    def _complete(self, chunk: _Chunk, postscale: float) -> None:
        poll_until(chunk.request.Test)
        from_ordered(chunk.ordered, chunk.own)
        self._group.spread(chunk.shared, postscale, self._owners)
        if chunk.shared is not chunk.piece:
            chunk.piece.array()[:] = chunk.shared.array()

    @collective
    def empty(self, nbytes: int) -> np.typing.NDArray[np.uint8] | None:
        """Allocate memory that is reduced without a copy; None on all ranks if a node has none."""
        arena = self._group.arena
        return _agree(self._comm, lambda: arena.empty(nbytes), lambda _: arena.forget_last())

    def slices(self) -> NodeSlices:
        alone = self._alone or self._across == MPI.COMM_NULL
        across = None if alone else self._across
        number = self._local.Get_rank()
        return NodeSlices(self._group, number, self._owners, across, self._nodes)

    @collective
    def close(self) -> None:
        self._group.close()
        for comm in (self._local, self._across):
            free_comm(self._failures, comm)


@dataclass(frozen=True)
class _Chunk:
    """A part of a buffer in progress, and the request between nodes."""

    piece: Buffer
    shared: Buffer
    own: Buffer
    ordered: Buffer
    request: MPI.Request


def _copy_to(piece: Buffer, place: Buffer) -> Buffer:
    shared = Buffer(place.pointer, piece.dtype, piece.count, owner=place)
    shared.array()[:] = piece.array()
    return shared
