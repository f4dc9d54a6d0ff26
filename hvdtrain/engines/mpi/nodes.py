"""Reduction by way of the nodes: within each in shared memory, between them over MPI."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.mpi.types import MPI_OPS, typed
from hvdtrain.engines.shared_memory.numpy_kernel import NumpyTeam, open_numpy_team
from hvdtrain.engines.shared_memory.system_errors import Objection, settle
from hvdtrain.engines.shared_memory.team import NodeTeam, open_team
from hvdtrain.errors import SystemLimitError
from hvdtrain.patience import wait_patiently
from hvdtrain.types import ReduceOp

__all__ = ["NodeHierarchy", "open_hierarchy"]

Team = NodeTeam | NumpyTeam

# What one rank sends at a time: two of 256 KiB fill a link of 1 Gbit/s, of 1 MiB two thirds of it.
_PIECE_BYTES = 256 << 10
# Data that peers do not reach goes through shared memory in such chunks.
_SCRATCH_BYTES = 4 << 20

# Smaller data are added sooner in one step of MPI's: between nodes, and on one.
_LEAST_BYTES_BETWEEN = 1 << 20
_LEAST_BYTES_WITHIN = 256 << 10


def open_hierarchy(
    comm: MPI.Intracomm, nodes: Sequence[int], kernel: ctypes.CDLL | None
) -> NodeHierarchy | None:
    """Have the ranks of each node share memory (collective).

    Args:
        comm: all ranks.
        nodes: for each rank the number of its node.
        kernel: of load_kernel(), on every rank; None on all of them to add with numpy.

    Returns:
        None on every rank where one node cannot share memory, or none has two ranks.
    """
    counts = [list(nodes).count(node) for node in set(nodes)]
    if max(counts) == 1:
        return None
    rank = comm.Get_rank()
    local = comm.Split(nodes[rank], rank)
    try:
        team: Team | None = _agree(comm, lambda: _open_node(local, kernel), lambda own: own.close())
    except SystemLimitError:
        local.Free()
        raise
    if team is None:
        local.Free()
        return None
    owners = min(counts)
    index = local.Get_rank()
    across = comm.Split(index if index < owners else MPI.UNDEFINED, rank)
    return NodeHierarchy(comm, local, across, team, owners)


def _open_node(local: MPI.Comm, kernel: ctypes.CDLL | None) -> Team | None:
    if kernel is None:
        return open_numpy_team(local)
    return open_team(kernel, local.Get_rank(), local.allgather)


def _agree(comm: MPI.Comm, get: Callable[[], Any], give_back: Callable[[Any], object]) -> Any:
    """Return what every node gets, or None on all ranks where one gets none (collective).

    Raises:
        SystemLimitError: that of a node, on all ranks.
    """
    got, objection = None, Objection()
    try:
        got = get()
    except SystemLimitError as error:
        objection = Objection(str(error), str(error))
    told = comm.allgather((got is not None, objection))
    everywhere = all(has for has, _ in told)
    if got is not None and not everywhere:
        give_back(got)
    settle(said for _, said in told)
    return got if everywhere else None


class NodeHierarchy:
    """The teams of all nodes, joined by their owners.

    The first ranks of each node, as many as the smallest node has, own a slice each. An owner
    adds its slice on the node, all-reduces it with the owners of that slice on the other nodes,
    and writes it into every copy on the node; so all of them drive the network at once.

    Args:
        comm: all ranks.
        local: the ranks of this node.
        across: the owners of this rank's slice on all nodes; a null communicator without one.
        team: the ranks of this node.
        owners: how many slices there are.

    Attributes:
        least_bytes: smaller data are not worth the way.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        local: MPI.Comm,
        across: MPI.Comm,
        team: Team,
        owners: int,
    ) -> None:
        self._comm, self._local, self._across = comm, local, across
        self._team, self._owners = team, owners
        self._alone = local.Get_size() == comm.Get_size()
        self.least_bytes = _LEAST_BYTES_WITHIN if self._alone else _LEAST_BYTES_BETWEEN
        self._scratch: list[Buffer] | None = None

    def allreduce(self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float) -> bool:
        """Reduce in place; factors other than 1 are for fractional types.

        Returns:
            Whether it did so; a node may have no memory to share that it takes.
        """
        reached = self._all_reach(buffer)
        scratch = [] if reached else self._open_scratch()
        if not reached and not scratch:
            return False
        chunk_bytes = buffer.nbytes if self._alone else self._owners * _PIECE_BYTES
        if not reached:
            chunk_bytes = min(chunk_bytes, _SCRATCH_BYTES)
        previous: _Chunk | None = None
        for number, piece in enumerate(buffer.pieces(chunk_bytes)):
            shared = piece if reached else _show(piece, scratch[number % 2])
            own = self._team.add(shared, op, prescale, self._owners)
            chunk = _Chunk(piece, shared, self._start(own, op))
            if previous is not None:
                self._complete(previous, postscale)
            previous = chunk
        if previous is not None:
            self._complete(previous, postscale)
        return True

    def _all_reach(self, buffer: Buffer) -> bool:
        """Agree whether every rank's data lies where the peers of its node reach it."""
        location = self._team.arena.location(buffer)
        lowest = np.array([location, -location], np.int64)
        self._comm.Allreduce(MPI.IN_PLACE, lowest, op=MPI.MIN)
        return bool(lowest[0] == -lowest[1] != 0)

    def _open_scratch(self) -> list[Buffer]:
        """Return two places in shared memory, which take turns (collective); [] for none."""
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
        wait_patiently(chunk.request.Test)
        self._team.spread(chunk.shared, postscale, self._owners)
        if chunk.shared is not chunk.piece:
            chunk.piece.array()[:] = chunk.shared.array()

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that is reduced without a copy (collective); None if a node has none."""
        arena = self._team.arena
        memory: npt.NDArray[np.uint8] | None = _agree(
            self._comm, lambda: arena.empty(nbytes), lambda _: arena.forget_last()
        )
        return memory

    def close(self) -> None:
        """Give the communicators and the memory back (collective)."""
        self._team.close()
        for comm in (self._local, self._across):
            if comm != MPI.COMM_NULL:
                comm.Free()


@dataclass(frozen=True)
class _Chunk:
    """A part of a buffer on its way: itself, where peers reach it, and what travels."""

    piece: Buffer
    shared: Buffer
    request: MPI.Request


def _show(piece: Buffer, place: Buffer) -> Buffer:
    """Copy a piece into shared memory."""
    shared = Buffer(place.pointer, piece.dtype, piece.count, owner=place)
    shared.array()[:] = piece.array()
    return shared
