"""Links between ranks, and models of the cost of an all-reduce. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

from hvdtrain.core.gradients.bucket_size import fit_cost


@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Attributes:
        bytes_per_second: bandwidth in each direction.
        core_share: share of the computing core that communication takes: 1 if the same core adds
            the gradients, 0 if a network card or a copy engine does the work.
        trees: whether ranks reduce as NCCL does, else as MPI; see allreduce_seconds().
    """

    name: str
    latency_seconds: float
    bytes_per_second: float
    core_share: float = 0.0
    trees: bool = False

    def slowed(self, factor: float) -> Link:
        """Return the link as it is if each rank has only 1/factor of the time of a core."""
        return replace(
            self,
            latency_seconds=self.latency_seconds * factor,
            bytes_per_second=self.bytes_per_second / factor,
        )


# Wire rates, and message latencies as MPI or NCCL see them.
PRESETS = {
    "25gbe": Link("25 GbE", 15e-6, 25e9 / 8),
    "hdr": Link("HDR InfiniBand", 1.5e-6, 200e9 / 8),
    "nvlink": Link("NVLink 3", 3e-6, 300e9, trees=True),
}


def allreduce_seconds(ranks: int, nbytes: float, link: Link) -> float:
    """Return how long `ranks` ranks take for an all-reduce: the best algorithm of MPI, or of NCCL.

        both   ring          2(n-1) a + 2(n-1)/n S b
        MPI    Rabenseifner  2 lg n a + 2(n-1)/n S b;  n no power of two: lg of the next lower
                             one, and 3 a + 2 S b more
        NCCL   two trees     2 lg n a + 2 S b;  n no power of two: lg of the next higher one

    Two binary trees, each with half of the data, in which each rank is a leaf of one of them at
    least, are due to Sanders, Speck and Traeff (Parallel Computing 35, 2009). Additions are part
    of the measured b, and overlap with the transfer in the presets.
    """
    if ranks == 1:
        return 0.0
    latency, wire = link.latency_seconds, nbytes / link.bytes_per_second
    ring = 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * wire
    if link.trees:
        return min(ring, 2 * (ranks - 1).bit_length() * latency + 2 * wire)
    lower = 1 << (ranks.bit_length() - 1)
    halving = 2 * log2(lower) * latency + 2 * (lower - 1) / lower * wire
    if lower < ranks:
        halving += 3 * latency + 2 * wire
    return min(ring, halving)


def fit_link(
    name: str, ranks: int, points: Sequence[tuple[int, float]], core_share: float = 0.0
) -> Link:
    """Fit latency and bandwidth to measured all-reduces.

    See `fit_cost`, which does it for all ranks together.
    """
    if ranks < 2 or len({nbytes for nbytes, _ in points}) < 2:
        raise ValueError("a link is fitted to two sizes at least, measured on two ranks or more")
    cost = fit_cost(points)
    one = allreduce_seconds(ranks, 0, Link(name, 1.0, 1.0))
    per_byte = allreduce_seconds(ranks, 1, Link(name, 0.0, 1.0))
    return Link(name, cost.latency_seconds / one, per_byte * cost.bytes_per_second, core_share)
