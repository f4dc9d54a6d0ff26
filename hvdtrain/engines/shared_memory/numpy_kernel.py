"""Reduction in shared memory without the compiled kernel, using numpy and MPI barriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.features import aligned_bounds
from hvdtrain.engines.shared_memory.memory import NodeArena, share_memory
from hvdtrain.polling import poll_until
from hvdtrain.types import ReduceOp

_FOLDS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


@collective
def open_numpy_node_group(comm: MPI.Comm) -> NumpyNodeGroup | None:
    """Set up shared memory among the ranks of one node; None if that fails."""
    tried = share_memory(1, comm.Get_rank(), comm.Get_size(), comm.allgather)
    return None if tried is None else NumpyNodeGroup(comm)


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

    def _slices(self, own: Buffer) -> list[npt.NDArray[Any]]:
        addresses = self.arena.addresses(self.arena.location(own))
        return [Buffer(address, own.dtype, own.count, owner=own).array() for address in addresses]
