"""Who is where: ranks and hosts. Pure facts, no MPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Topology", "cpu_threads", "format_ranks"]


@dataclass(frozen=True)
class Topology:
    """The place of one rank in the world, in Horovod's words.

    A node is a group of ranks that have proved to share memory. `local_*` counts inside the
    node; `cross_*` counts over the nodes that have a rank with this local_rank. `homogeneous`:
    all nodes have equally many ranks. `node` is the number of its node, in the order of their
    first ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostnames: tuple[str, ...]
    homogeneous: bool = True
    node: int = 0

    @classmethod
    def from_nodes(cls, rank: int, nodes: Sequence[int], hostnames: Sequence[str]) -> Topology:
        """Derive the place of `rank` from the node number and the host name of every rank.

        Args:
            rank: this rank.
            nodes: for each rank a number that is equal exactly within one node.
            hostnames: for each rank its host name, for people to read.
        """
        place: list[int] = []
        seen: dict[int, int] = {}
        for node in nodes:
            place.append(seen.get(node, 0))
            seen[node] = place[-1] + 1
        peers = [r for r in range(len(nodes)) if place[r] == place[rank]]
        return cls(
            rank=rank,
            size=len(nodes),
            local_rank=place[rank],
            local_size=seen[nodes[rank]],
            cross_rank=peers.index(rank),
            cross_size=len(peers),
            hostnames=tuple(hostnames),
            homogeneous=len(set(seen.values())) == 1,
            node=list(seen).index(nodes[rank]),
        )

    @property
    def title(self) -> str:
        """How messages name this rank, e.g. "[rank 2/4]"."""
        return f"[rank {self.rank}/{self.size}]"

    @property
    def hosts(self) -> int:
        """How many host names the ranks have."""
        return len(set(self.hostnames))


def cpu_threads(topology: Topology, affinity: int, machine: int) -> int:
    """Return how many compute threads this rank should run.

    A rank that its launcher has bound to some cores has those for itself; ranks that may run
    anywhere share the machine's.

    Args:
        topology: the place of the rank.
        affinity: how many cores the rank may run on.
        machine: how many cores the machine has.
    """
    sharing = topology.local_size if affinity >= machine else 1
    return max(1, affinity // sharing)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as messages list them, e.g. "rank 3" or "ranks 0-2, 5, 6"."""
    numbers = sorted(ranks)
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(names)}"
