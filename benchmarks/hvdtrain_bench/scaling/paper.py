"""Scaling on paper: what a step costs on any number of ranks, from a few figures. Pure.

Gradients of bucket k = 1..K are ready r_k after the start of backward, and are copied into it,
which takes C S_k / S. Buckets share one channel:

    d_k = sum_{j<=k} C S_j / S + c sum_{j<k} T_j
    s_k = max(r_k + d_k, f_{k-1}),  f_k = s_k + T_k,  T_k = T(n, S_k)
    T_step = T_fwd + max(T_bwd + d_K, f_K) + T_opt + sigma e_n

c is the share of a core that computes which communication takes away, and e_n the expected
maximum of n standard normal numbers: a step waits for its slowest rank. One rank copies nothing.
Exchanges other than the average change T_k, and add to T_opt; see scheme.py.

A quantity with a spread is a sequence of values that are equally likely, as its repeated
measurements are; one that is given is a sequence of one value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from statistics import NormalDist, mean, median, quantiles
from typing import TypeVar

from hvdtrain_bench.scaling.scheme import (
    AVERAGE,
    Cluster,
    Link,
    Scheme,
    backward_seconds,
    later_seconds,
    optimizer_share,
)

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
    """Return DRAWS values at random, the same in each call; a given value as it is.

    Quantities that are drawn with different seeds vary independently of one another.
    """
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
    own = replace(
        work,
        optimizer_seconds=work.optimizer_seconds * optimizer_share(cluster, scheme, ranks),
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
