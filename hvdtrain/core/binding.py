"""Whether the ranks of a node have cores of their own, and enough of them for their threads."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.core.agreement.votes import exchange
from hvdtrain.core.process.exits import say
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.topology import Topology

__all__ = ["Seat", "binding_warnings", "count_threads", "warn_of_binding"]


@dataclass(frozen=True)
class Seat:
    """What a rank computes with.

    Attributes:
        rank: of the world.
        cores: numbers of those that it may run on.
        threads: how many it computes with; 1 where nobody knows yet.
    """

    rank: int
    cores: frozenset[int]
    threads: int


def binding_warnings(host: str, seats: Sequence[Seat]) -> list[str]:
    """Say what is wrong with the cores of one node's ranks, and what to do (pure).

    Args:
        host: its name.
        seats: of all its ranks.
    """
    cores = frozenset[int]().union(*(seat.cores for seat in seats))
    alone = [seat for seat in seats if len(seat.cores) == 1]
    taken = Counter(seat.cores for seat in alone)
    crowded = [seat for seat in alone if taken[seat.cores] > 1]
    found = []
    if len(cores) < len(seats):
        found.append(
            f"{_ranks(seats)} on {host}: {len(cores)} core{'s' * (len(cores) > 1)} for all of "
            "them: start fewer ranks there, or, if mpirun has bound them, add --bind-to none to it"
        )
    elif crowded:
        found.append(
            f"{_ranks(crowded)} on {host}: bound to one core that another rank has, too: add "
            "--bind-to none to mpirun, or --map-by core to give each its own"
        )
    if busy := [seat for seat in alone if seat.threads > 1]:
        most = max(seat.threads for seat in busy)
        found.append(
            f"{_ranks(busy)} on {host}: bound to one core, but computing with {most} threads: add "
            f"--bind-to none to mpirun, or --map-by slot:PE={most}, or set OMP_NUM_THREADS=1"
        )
    return found


def count_threads(environ: Mapping[str, str], modules: Mapping[str, Any]) -> int:
    """Return how many threads this rank computes with: torch's word, or OMP_NUM_THREADS."""
    if "torch" in modules:
        threads: int = modules["torch"].get_num_threads()
        return threads
    outermost = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, int(outermost)) if outermost.isdecimal() else 1


def warn_of_binding(world: EngineWorld, topology: Topology) -> None:
    """Have one rank of each node say what is wrong with its cores (collective)."""
    cores = frozenset(os.sched_getaffinity(0))
    own = Seat(topology.rank, cores, count_threads(os.environ, sys.modules))
    told = exchange(world.communicator, [own])
    if topology.local_rank == 0:
        here = world.nodes[topology.rank]
        seats = [seat for (seat,) in told if world.nodes[seat.rank] == here]
        for text in binding_warnings(topology.hostnames[topology.rank], seats):
            say(topology.title, text)


def _ranks(seats: Sequence[Seat]) -> str:
    numbers = [seat.rank for seat in seats]
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and numbers == list(range(first, last + 1)):
        return f"ranks {first}-{last}"
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
