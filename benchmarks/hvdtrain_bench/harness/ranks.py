"""The ranks of a benchmark: how they synchronize, and how they exchange measurements."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from mpi4py import MPI

from hvdtrain.engines.communicator import poll_until
from hvdtrain.topology import format_by_rank

T = TypeVar("T")


class Ranks:
    """All ranks of the job, with their own MPI communicator (collective).

    Every method is collective. The libraries that are measured are not used here.
    """

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    @property
    def title(self) -> str:
        return f"[rank {self.rank}/{self.size}]"

    def meet(self) -> None:
        """Wait for all ranks, and return at nearly the same moment; waiting uses a whole core."""
        self._comm.Barrier()

    def rest(self) -> None:
        """Wait for all ranks, with sleeps that leave the cores to others."""
        poll_until(self._comm.Ibarrier().Test)

    def largest(self, value: float) -> float:
        return float(self._comm.allreduce(value, MPI.MAX))

    def of_root(self, value: T) -> T:
        own: T = self._comm.bcast(value)
        return own

    def all_of(self, value: T) -> list[T]:
        values: list[T] = self._comm.allgather(value)
        return values

    def reason(self, problem: str) -> str:
        """Return the first problem of a rank that is not empty, on all ranks."""
        return next(filter(None, self.all_of(problem)), "")

    def cores(self) -> str:
        """Return the cores on which the ranks may run, and whether these are all."""
        mine: list[int] = sorted(os.sched_getaffinity(0))
        of_ranks: list[Any] = self.all_of((mine, os.cpu_count()))
        if all(len(cores) == count for cores, count in of_ranks):
            return f"all {of_ranks[0][1]}, not bound"
        return format_by_rank([_span(cores) for cores, _ in of_ranks])


def _span(cores: list[int]) -> str:
    whole = cores == list(range(cores[0], cores[-1] + 1))
    return f"{cores[0]}-{cores[-1]}" if whole and len(cores) > 1 else ",".join(map(str, cores))
