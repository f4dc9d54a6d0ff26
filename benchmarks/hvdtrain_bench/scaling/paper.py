"""Scaling on paper: what a step costs on any number of ranks, from a few figures.

Gradients of bucket k = 1..K are ready r_k after the start of backward, and are copied into it,
which takes C S_k / S. Buckets share one channel:

    d_k = sum_{j<=k} C S_j / S + c sum_{j<k} T_j
    s_k = max(r_k + d_k, f_{k-1}),  f_k = s_k + T_k,  T_k = T(n, S_k)
    T_step = T_fwd + max(T_bwd + d_K, f_K) + T_opt + sigma e_n

c is the share of a core that computes which communication takes away, and e_n the expected
maximum of n standard normal numbers: a step waits for its slowest rank. One rank copies nothing.
Exchanges other than the average change T_k, and add to T_opt; see Scheme.

The ranks of a node reduce-scatter and gather over the link within the node. Between nodes each
reduces its own slice, and all of them share the node's network card. There an exchange may send
less than the gradients, which takes more collectives and computations.

A quantity with a spread is a sequence of values that are equally likely, as its repeated
measurements are; one that is given is a sequence of one value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from random import Random
from statistics import NormalDist, mean, median, quantiles
from typing import TypeVar

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.measured_costs import rehearse, small
from hvdtrain.core.gradients.plan import ParameterSpec, fit_cost
from hvdtrain.types import DType
from hvdtrain_bench.harness.results import SHARDED, period_of


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
    """Fit latency and bandwidth to measured all-reduces; see `fit_cost`."""
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


T = TypeVar("T")

# The share of the values that an interval contains: all but the lowest and the highest 5 %.
COVERAGE = 0.9
_PARTS = round(2 / (1 - COVERAGE))
DRAWS = 200


@dataclass(frozen=True)
class PredictionInterval:
    """The interval that contains a value with the probability COVERAGE."""

    low: float
    middle: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval_of(values: Sequence[float]) -> PredictionInterval:
    """Return the interval of values that are equally likely."""
    if len(set(values)) == 1:
        return PredictionInterval(values[0], values[0], values[0])
    cuts = quantiles(values, n=_PARTS, method="inclusive")
    return PredictionInterval(cuts[0], median(values), cuts[-1])


def drawn(values: Sequence[T], seed: int) -> Sequence[T]:
    """Return DRAWS values at random, the same in each call of one seed; a given value as it is."""
    return values if len(values) == 1 else Random(seed).choices(values, k=DRAWS)


_PERFECT = Link("perfect", 0.0, inf)


@dataclass(frozen=True)
class Work:
    name: str
    forward_seconds: float
    backward_seconds: float  # time of the backward pass without communication
    optimizer_seconds: float
    # Size in bytes of each bucket, in the order of reduction, and when it is ready in seconds after
    # the start of backward.
    buckets: tuple[tuple[int, float], ...]
    jitter_seconds: float = 0.0  # standard deviation of the step time between ranks
    # Time to copy all gradients into their buckets, in the computing thread.
    copy_seconds: float = 0.0

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds

    def slowed(self, factor: float) -> Work:
        """Return the work of a rank that takes `factor` times as long for all of it."""
        return replace(
            self,
            forward_seconds=self.forward_seconds * factor,
            backward_seconds=self.backward_seconds * factor,
            optimizer_seconds=self.optimizer_seconds * factor,
            buckets=tuple((nbytes, ready * factor) for nbytes, ready in self.buckets),
            jitter_seconds=self.jitter_seconds * factor,
            copy_seconds=self.copy_seconds * factor,
        )


@dataclass(frozen=True)
class StepPrediction:
    """A predicted step on `ranks` ranks with the same batch each."""

    ranks: int
    seconds: PredictionInterval
    efficiency: PredictionInterval  # step time on one rank / seconds
    exposed_seconds: PredictionInterval  # time in which ranks only wait for communication


def even_work(
    name: str,
    phases: tuple[float, float, float],
    nbytes: int,
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> Work:
    """Return the work of a model whose gradients become ready evenly through the backward pass."""
    forward, backward, optimizer = phases
    buckets: list[tuple[int, float]] = []
    done = 0
    while done < nbytes:
        size = min(bucket_bytes if buckets else first_bucket_bytes, nbytes - done)
        done += size
        buckets.append((size, backward * done / nbytes))
    return Work(name, forward, backward, optimizer, tuple(buckets))


def jitter_seconds(times: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of a rank's step time, over steps that ranks began together.

    Delays that all ranks have in common do not count: the slowest of n is on average sigma e_n
    above their mean. The median over the steps ignores outliers.
    """
    behind = median(max(step) - mean(step) for step in zip(*times, strict=True))
    return behind / _expected_maximum(len(times)) if len(times) > 1 else 0.0


def step_seconds(
    work: Work, ranks: int, allreduce: Callable[[float], float], core_share: float = 0.0
) -> float:
    """Return the time of a step on `ranks` ranks (see the module)."""
    taken = finished = backward = 0.0
    copied = work.copy_seconds if ranks > 1 else 0.0
    total = sum(nbytes for nbytes, _ in work.buckets)
    for nbytes, ready in work.buckets:
        taken += copied * nbytes / total if total else 0.0
        backward = work.backward_seconds + taken
        seconds = allreduce(nbytes)
        finished = max(ready + taken, finished) + seconds
        taken += core_share * seconds
    end = max(work.backward_seconds, backward, finished)
    waiting = work.jitter_seconds * _expected_maximum(ranks)
    return work.forward_seconds + end + work.optimizer_seconds + waiting


def seconds_on(work: Work, ranks: int, cluster: Cluster, scheme: Scheme = AVERAGE) -> float:
    """Return the time of a step on a cluster, or its mean if not all steps communicate."""
    sharers = _sharers(cluster, ranks) if scheme.sharded else 1
    own = replace(
        work,
        optimizer_seconds=work.optimizer_seconds / sharers,
        copy_seconds=work.copy_seconds / scheme.period,
    )
    share = cluster.network.core_share if ranks > 1 else 0.0
    seconds = step_seconds(
        own, ranks, lambda nbytes: backward_seconds(cluster, scheme, ranks, nbytes), share
    )
    return seconds + later_seconds(cluster, scheme, ranks, [nbytes for nbytes, _ in work.buckets])


def predict(
    works: Sequence[Work],
    alone: Sequence[Work],
    ranks: Sequence[int],
    clusters: Sequence[Cluster],
    scheme: Scheme = AVERAGE,
) -> list[StepPrediction]:
    """Predict weak scaling, where every rank keeps its batch, from works that are equally likely.

    There are as many of one rank alone as of one among others.
    """
    predictions = []
    for count in ranks:
        seconds, efficiency, exposed = [], [], []
        for number in range(max(len(works), len(clusters))):
            single = alone[number % len(alone)]
            own = works[number % len(works)] if count > 1 else single
            cluster = clusters[number % len(clusters)]
            step = seconds_on(own, count, cluster, scheme)
            seconds.append(step)
            efficiency.append(step_seconds(single, 1, lambda _: 0.0) / step)
            perfect = replace(cluster, network=_PERFECT, node=cluster.node and _PERFECT)
            exposed.append(step - seconds_on(own, count, perfect, scheme))
        found = (interval_of(values) for values in (seconds, efficiency, exposed))
        predictions.append(StepPrediction(count, *found))
    return predictions


def _expected_maximum(count: int) -> float:
    """Return the mean of the largest of `count` standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
