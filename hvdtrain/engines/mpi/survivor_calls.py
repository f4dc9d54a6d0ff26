"""Calls of Open MPI's ULFM that end on all ranks that are left, however others end meanwhile."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Self, cast

import numpy as np
from mpi4py import MPI

from hvdtrain.collective import collective
from hvdtrain.polling import poll_until

_ENDS = 1  # tag of messages
# Ranks look for them ten times a second.
_HEARD_SECONDS = 1.0


# mpi4py declares the result as a communicator of any kind.
@collective
def shrunk(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that are left (collective over them)."""
    made = cast("MPI.Intracomm", comm.Shrink())
    agree(comm, True)  # a rank that is still making what another one revokes would crash
    return made


@collective
def agree(comm: MPI.Comm, value: bool) -> bool:
    """Return whether a value is true on all ranks, none of which has ended.

    The result is the same on all that are left, also if the communicator is revoked.
    """
    flag = np.array([value], np.int32)
    try:
        poll_until(comm.Iagree(flag).Test)
    except MPI.Exception:  # raised on all, if one has ended
        return False
    return bool(flag[0])


class EndNotice:
    """Ends all ranks where some have joined: MPI_Abort ends only those of one MPI_COMM_WORLD."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    @classmethod
    @collective
    def of(cls, comm: MPI.Intracomm) -> Self | None:
        """Return a notice for ranks that have more than one MPI_COMM_WORLD, else None."""
        own = MPI.COMM_WORLD.Get_group()
        if MPI.UNDEFINED not in comm.Get_group().Translate_ranks(None, own):
            return None
        return cls(shrunk(comm))

    def give(self, code: int) -> None:
        """Have all other ranks end with an exit code, and wait until they have heard."""
        mark = np.array([code], np.int32)
        with suppress(MPI.Exception):
            lost = self._comm.Get_failed().Translate_ranks(None, self._comm.Get_group())
            others = set(range(self._comm.size)) - {self._comm.rank, *lost}
            requests = [self._comm.Isend(mark, rank, _ENDS) for rank in others]
            MPI.Request.Testall(requests)
        time.sleep(_HEARD_SECONDS)

    def heed(self) -> None:
        """End the ranks of this MPI_COMM_WORLD if a rank has given notice."""
        mark = np.zeros(1, np.int32)
        for rank in range(self._comm.size):
            with suppress(MPI.Exception):
                if self._comm.Iprobe(rank, _ENDS):
                    self._comm.Recv(mark, rank, _ENDS)
                    MPI.COMM_WORLD.Abort(int(mark[0]))
