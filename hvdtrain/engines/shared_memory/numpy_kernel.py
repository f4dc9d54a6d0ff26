"""The ranks of a node that share memory, but have no compiled kernel: numpy adds, MPI meets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.engines.shared_memory.memory import NodeArena, share_memory
from hvdtrain.patience import wait_patiently
from hvdtrain.types import ReduceOp

__all__ = ["NumpyTeam", "open_numpy_team"]

_FOLDS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
# A slice begins on a cache line of its own, as in the kernel.
_SLICE_ELEMENTS = 64


def open_numpy_team(comm: MPI.Comm) -> NumpyTeam | None:
    """Have the ranks of one node share memory (collective); None where that is not possible."""
    tried = share_memory(1, comm.Get_rank(), comm.Get_size(), comm.allgather)
    return None if tried is None else NumpyTeam(comm)


class NumpyTeam:
    """The two halves of a reduction in shared memory, as of NodeTeam, in the order of the ranks.

    Each is a few calls over whole slices: a thread that comes back from numpy waits for Python's
    lock, which is dear beside a busy main thread.

    Attributes:
        arena: memory that is reduced without a copy.

    Args:
        comm: the ranks of the node; its owner frees it.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._rank = comm, comm.Get_rank()
        self.arena = NodeArena(self._rank, comm.Get_size(), comm.allgather)

    @np.errstate(all="ignore")  # as in MPI and C; loss scalers look for what overflows
    def add(self, buffer: Buffer, op: ReduceOp, prescale: float, owners: int) -> Buffer:
        """Return this rank's slice of `buffer`, in which the node is added up (collective).

        Args:
            buffer: in shared memory, at one place on all ranks.
            op: the reduction.
            prescale: factor before it.
            owners: how many ranks get a slice.
        """
        buffer.scale(prescale)
        self._meet()
        own = self._own_slice(buffer, owners)
        if own.count:
            slices = self._slices(own)
            # What is added up already lies in the first copy until this rank's own has been added.
            total = slices[0]
            for rank, part in enumerate(slices[1:], start=1):
                target = slices[self._rank] if rank >= self._rank else slices[0]
                _FOLDS[op](total, part, out=target)
                total = target
        return own

    def spread(self, buffer: Buffer, postscale: float, owners: int) -> None:
        """Have all ranks hold postscale times every owner's slice of `buffer` (collective)."""
        own = self._own_slice(buffer, owners)
        if own.count:
            own.scale(postscale)
            for rank, part in enumerate(self._slices(own)):
                if rank != self._rank:
                    part[:] = own.array()
        self._meet()

    def close(self) -> None:
        """Give up what the team holds (local)."""
        self.arena.close()

    def _meet(self) -> None:
        # MPI's own barrier would burn a core while a rank is late.
        wait_patiently(self._comm.Ibarrier().Test)

    def _own_slice(self, buffer: Buffer, owners: int) -> Buffer:
        each = -(-buffer.count // owners)
        each = -(-each // _SLICE_ELEMENTS) * _SLICE_ELEMENTS
        if self._rank >= owners:
            each = 0
        start = min(each * self._rank, buffer.count)
        return buffer.slice(start, min(each, buffer.count - start))

    def _slices(self, own: Buffer) -> list[npt.NDArray[Any]]:
        addresses = self.arena.addresses(self.arena.location(own))
        return [Buffer(address, own.dtype, own.count, owner=own).array() for address in addresses]
