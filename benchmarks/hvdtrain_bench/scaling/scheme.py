"""Links between ranks, and what exchanges of gradients cost on a cluster of them, on paper.

The ranks of a node reduce-scatter and gather over the link within the node. Between nodes each
reduces its own slice, and all of them share the node's network card. There an exchange may send
less than the gradients, which takes more collectives and computations; see Scheme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.measured_costs import rehearse, small
from hvdtrain.core.gradients.bucket_size import fit_cost
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.types import DType
from hvdtrain_bench.harness.settings import SHARDED, period_of


@dataclass(frozen=True)
class Link:
    name: str
    latency_seconds: float
    bytes_per_second: float  # bandwidth in each direction
    # Share of the computing core that communication takes: 1 if the same core adds the gradients, 0
    # if a network card or a copy engine does the work.
    core_share: float = 0.0
    trees: bool = False  # whether ranks reduce as NCCL does, else as MPI; see allreduce_seconds()

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


@dataclass(frozen=True)
class Scheme:
    """A way to exchange gradients, as a step with it differs from one with the average.

    A bucket of S bytes crosses the network between n nodes as an all-reduce of
    S (rate + n rate_per_node) bytes, in `calls` collectives.
    """

    name: str
    rate: float = 1.0
    rate_per_node: float = 0.0
    calls: float = 1.0
    bucket_seconds: float = 0.0  # computation for a bucket, however small
    seconds_per_byte: float = 0.0  # computation for each byte of the gradients
    # Number of steps from one exchange to the next, of weights after the optimizer; 1 for exchanges
    # of gradients.
    period: int = 1
    # Whether ranks share the work of the optimizer, and then gather the weights.
    sharded: bool = False

    def on_one_node(self) -> Scheme:
        """Return what it does without a network: exchanges of gradients only average there."""
        return self if self.sharded or self.period > 1 else AVERAGE


AVERAGE = Scheme("average")


@dataclass(frozen=True)
class Cluster:
    network: Link  # link between nodes, or between all ranks if each has a card of its own
    node: Link | None = None  # link between the ranks of a node; None if each has a card of its own
    ranks_per_node: int = 1

    def on_node(self, ranks: int) -> int:
        return min(ranks, self.ranks_per_node)

    def nodes(self, ranks: int) -> int:
        return -(-ranks // self.on_node(ranks))


def backward_seconds(cluster: Cluster, scheme: Scheme, ranks: int, nbytes: float) -> float:
    """Return how long the reduction of a bucket takes, which backward may hide."""
    if scheme.period > 1:
        return 0.0
    whole = _within(cluster, ranks, nbytes) + _between(cluster, scheme, ranks, nbytes)
    return whole - _gathering(cluster, scheme, ranks, nbytes)


def later_seconds(cluster: Cluster, scheme: Scheme, ranks: int, buckets: Sequence[float]) -> float:
    """Return how long a step communicates after its optimizer, on average."""
    if scheme.period > 1:
        return sum(backward_seconds(cluster, AVERAGE, ranks, n) for n in buckets) / scheme.period
    return sum(_gathering(cluster, scheme, ranks, nbytes) for nbytes in buckets)


def optimizer_share(cluster: Cluster, scheme: Scheme, ranks: int) -> float:
    """Return the share of the optimizer's work that a rank has."""
    return 1 / _sharers(cluster, ranks) if scheme.sharded else 1.0


def _sharers(cluster: Cluster, ranks: int) -> int:
    """Return how many ranks share the optimizer's work: those of a node, if there are several."""
    return cluster.ranks_per_node if 1 < cluster.ranks_per_node < ranks else ranks


def _within(cluster: Cluster, ranks: int, nbytes: float) -> float:
    if cluster.node is None:
        return 0.0
    return allreduce_seconds(cluster.on_node(ranks), nbytes, cluster.node)


def _between(cluster: Cluster, scheme: Scheme, ranks: int, nbytes: float) -> float:
    nodes, owners, network = cluster.nodes(ranks), cluster.on_node(ranks), cluster.network
    if nodes == 1:
        return 0.0
    shared = replace(network, bytes_per_second=network.bytes_per_second / owners)
    sent = nbytes / owners * (scheme.rate + nodes * scheme.rate_per_node)
    starts = (scheme.calls - 1) * allreduce_seconds(nodes, 0, shared)
    computing = scheme.bucket_seconds + nbytes / owners * scheme.seconds_per_byte
    return allreduce_seconds(nodes, sent, shared) + starts + computing


def _gathering(cluster: Cluster, scheme: Scheme, ranks: int, nbytes: float) -> float:
    """Return how long those who share the optimizer's work gather weights: half an all-reduce."""
    if not scheme.sharded:
        return 0.0
    if _sharers(cluster, ranks) == ranks and cluster.nodes(ranks) > 1:
        return _between(cluster, scheme, ranks, nbytes) / 2
    return _within(cluster, ranks, nbytes) / 2


_MATRIX = (1024, 1024)
# What is sent depends a little on the number of nodes, into which small gradients are divided.
_LEAST_SHARE = 0.05


def measured_scheme(name: str, specs: Sequence[ParameterSpec]) -> Scheme:
    """Return what a scheme does on paper; exchanges of gradients are rehearsed (local)."""
    if name == SHARDED:
        return Scheme(name, sharded=True)
    if (period := period_of(name)) > 1:
        return Scheme(name, period=period)
    exchange, memory = make_exchange(name), Buffer.from_array(np.empty(0, np.float32))
    start = rehearse(exchange, small(specs[0]), memory, 2).seconds
    seconds, calls = 0.0, 1
    sent = {2: 0.0, 4: 0.0}
    one_of_each = {spec.shape: spec for spec in specs}
    for shape, count in Counter(spec.shape for spec in specs).items():
        for nodes in sent:
            found = rehearse(exchange, one_of_each[shape], memory, nodes)
            sent[nodes] += count * found.nbytes
            if nodes == 2:
                seconds += count * max(0.0, found.seconds - start)
                calls = max(calls, found.calls)
    total = sum(spec.nbytes for spec in specs)
    more = (sent[4] - sent[2]) / 2
    per_node = more / total if abs(more) > _LEAST_SHARE * sent[2] else 0.0
    return Scheme(
        name,
        rate=sent[2] / total - 2 * per_node,
        rate_per_node=per_node,
        calls=calls,
        bucket_seconds=start,
        seconds_per_byte=seconds / total,
    )


def scheme_of_any_model(name: str) -> Scheme:
    """Return the same for a model of which nothing is known: its parameters are large matrices."""
    spec = ParameterSpec("any", _MATRIX, (_MATRIX[1], 1), DType.FLOAT32, "float32", "cpu")
    return measured_scheme(name, [spec])
