"""The location of ranks on nodes and hosts, and the addresses of a host."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType


@dataclass(frozen=True)
class Topology:
    """The location of one rank in the world, in Horovod's terms.

    A node is a group of ranks that share memory.
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
        """Derive the location of a rank from the node and host name of every rank."""
        local: list[int] = []
        seen: dict[int, int] = {}
        for node in nodes:
            local.append(seen.get(node, 0))
            seen[node] = local[-1] + 1
        peers = [r for r in range(len(nodes)) if local[r] == local[rank]]
        return cls(
            rank=rank,
            size=len(nodes),
            local_rank=local[rank],
            local_size=seen[nodes[rank]],
            cross_rank=peers.index(rank),
            cross_size=len(peers),
            hostnames=tuple(hostnames),
            homogeneous=len(set(seen.values())) == 1,
            node=list(seen).index(nodes[rank]),
        )

    @property
    def title(self) -> str:
        """The name of this rank in messages, e.g. "[rank 2/4]"."""
        return f"[rank {self.rank}/{self.size}]"

    @property
    def hosts(self) -> int:
        """Number of different host names."""
        return len(set(self.hostnames))


def cpu_threads(topology: Topology, affinity: int, machine: int) -> int:
    """Return the number of compute threads that this rank should use.

    A rank that its launcher has bound to some cores uses them alone; ranks that are not bound share
    those of the machine.
    """
    sharing = topology.local_size if affinity >= machine else 1
    return max(1, affinity // sharing)


def fill_cores(ranks: Sequence[RankCores], limits: Mapping[str, float]) -> bool:
    """Return whether the threads of some ranks of a node take all cores that they may use.

    Their control groups may limit them to the time of fewer cores, or parts of cores.
    """
    cores = frozenset[int]().union(*(rank.cores for rank in ranks))
    return sum(rank.threads for rank in ranks) >= min(len(cores), sum(limits.values()))


def count_threads(environ: Mapping[str, str], modules: Mapping[str, ModuleType]) -> int:
    """Return how many threads this rank computes with: torch's setting, or OMP_NUM_THREADS."""
    if "torch" in modules:
        threads: int = modules["torch"].get_num_threads()
        return threads
    outermost = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, int(outermost)) if outermost.isdecimal() else 1


# With hundreds of ranks a message lists no more of them, or lines about them, one by one.
_MOST = 8


def shortened(texts: Sequence[str], separator: str, more: str, most: int = _MOST) -> str:
    """Join texts, with the number of those beyond `most` before what `more` calls them."""
    beyond = len(texts) - most
    return separator.join([*texts[:most], *([f"and {beyond} more{more}"] if beyond > 0 else [])])


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Divide numbers into runs of consecutive ones."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    return [[number for _, number in run] for _, run in groups]


def format_ranks(ranks: Iterable[int], most: int = _MOST) -> str:
    """Return ranks as messages list them, e.g. "rank 3" or "ranks 0-2, 5, 6"."""
    numbers = sorted(ranks)
    runs = runs_of(numbers)
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    if len(runs) > most:
        rest = sum(map(len, runs[most:]))
        names = [*names[:most], f"and {rest} more up to {numbers[-1]}"]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(names)}" if runs else "no rank"


def format_by_rank(values: Sequence[str] | Mapping[int, str]) -> str:
    """Return which ranks have which value, e.g. "ranks 0, 1: cuda:0; rank 2: cpu"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        ranks.setdefault(value, []).append(rank)
    texts = [f"{format_ranks(those)}: {value}" for value, those in ranks.items()]
    return shortened(texts, "; ", " values")


@dataclass(frozen=True)
class RankCores:
    """The cores that a rank may use, and its threads."""

    rank: int
    cores: frozenset[int]
    threads: int


def binding_warnings(host: str, ranks: Sequence[RankCores], there: int) -> list[str]:
    """Return what is wrong with the CPU binding of one node of `there` cores, and what to do."""
    cores = frozenset[int]().union(*(rank.cores for rank in ranks))
    bound = [rank for rank in ranks if len(rank.cores) == 1]
    taken = Counter(rank.cores for rank in bound)
    crowded = [rank for rank in bound if taken[rank.cores] > 1]
    found = []
    if len(cores) < len(ranks):
        found.append(
            f"{_names(ranks)} on {host}: {len(cores)} core{'s' * (len(cores) > 1)} for all of "
            "them: start fewer ranks there"
            + ", or, if mpirun has bound them, add --bind-to none to it"
            * (len(cores) < there)
        )
    elif crowded:
        found.append(
            f"{_names(crowded)} on {host}: bound to one core that another rank has, too: add "
            "--bind-to none to mpirun, or --map-by core to give each its own"
        )
    if busy := [rank for rank in bound if rank.threads > 1]:
        most = max(rank.threads for rank in busy)
        found.append(
            f"{_names(busy)} on {host}: bound to one core, but computing with {most} threads: add "
            f"--bind-to none to mpirun, or --map-by slot:PE={most}, or set OMP_NUM_THREADS=1"
        )
    return found


def _names(ranks: Sequence[RankCores]) -> str:
    return format_ranks(rank.rank for rank in ranks)


LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of a network interface
_NAME_BYTES, _FIRST_BYTE = 15, 20


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface of this host; None if there is none."""
    request = struct.pack("256s", name.encode()[:_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[_FIRST_BYTE : _FIRST_BYTE + 4])
