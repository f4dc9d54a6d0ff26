"""The ranks of a benchmark: how they meet, and how they tell one another what they measured."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from mpi4py import MPI

from hvdtrain.polling import poll_until

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """All ranks of the job, on an MPI communicator of their own (collective).

    Every method is collective. Nothing of what is measured is used here.

    Attributes:
        rank: number of this rank.
        size: how many there are.
    """

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    @property
    def title(self) -> str:
        """Names this rank in messages."""
        return f"[rank {self.rank}/{self.size}]"

    def meet(self) -> None:
        """Return when all ranks have come, at nearly the same moment; waiting burns a core."""
        self._comm.Barrier()

    def rest(self) -> None:
        """Return when all ranks have come; waiting leaves the machine to the others."""
        poll_until(self._comm.Ibarrier().Test)

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return float(self._comm.allreduce(value, MPI.MAX))

    def of_root(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        own: T = self._comm.bcast(value)
        return own

    def all_of(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        values: list[T] = self._comm.allgather(value)
        return values

    def reason(self, problem: str) -> str:
        """Return the first rank's problem that is not empty, so that all do without or none."""
        return next(filter(None, self.all_of(problem)), "")

    def cores(self) -> str:
        """Say on which cores the ranks may run, and whether that is all there are."""
        mine: list[int] = sorted(os.sched_getaffinity(0))
        of_ranks: list[Any] = self.all_of((mine, os.cpu_count()))
        if all(len(cores) == count for cores, count in of_ranks):
            return f"all {of_ranks[0][1]}, not bound"
        return "; ".join(_span(cores) for cores, _ in of_ranks)


def _span(cores: list[int]) -> str:
    whole = cores == list(range(cores[0], cores[-1] + 1))
    return f"{cores[0]}-{cores[-1]}" if whole and len(cores) > 1 else ",".join(map(str, cores))
