"""The cost model of a step with any exchange for each gradient (pure).

Bucket k = 1..K is filled r_k after the end of the step before, if all are averaged. Buckets share
one channel, and its computations P_k take a share c of the cores that compute the gradients:

    d_k = c sum_{j<k} (P_j - P_j of the average)
    s_k = max(r_k + d_k, f_{k-1}),  f_k = s_k + T_k,  T_step = f_K + R

R is what a measured step with the average takes beyond this: waiting for slower ranks.

The gradients of a bucket are divided into runs, each of which one exchange reduces. With m
collectives of latency a and bandwidth b between nodes, w bytes for each gradient, C seconds to
compress it and C_0 to begin, o owners of slices, and T_node within a node:

    P_k = sum over runs (C_0 + sum over gradients C / o)
    T_k = T_node(S_k) + P_k + sum over runs (m a + sum over gradients w / (b o))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite

from hvdtrain.core.gradients.bucket_size import AllreduceCost
from hvdtrain.core.gradients.plan import Bucket, BucketPlan


@dataclass(frozen=True)
class GradientCost:
    """The cost of one gradient with an exchange, if one owner has all of it.

    Attributes:
        seconds: computation, besides that of the run.
    """

    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Method:
    """An exchange, and what it costs.

    Attributes:
        seconds: computation of a run, however small.
    """

    name: str
    calls: float
    seconds: float
    gradients: tuple[GradientCost, ...]


@dataclass(frozen=True)
class Measured:
    """What a prediction needs to know, equal on all ranks."""

    nodes: int
    owners: int
    network: AllreduceCost
    node: AllreduceCost
    ready_seconds: tuple[float, ...]
    methods: tuple[Method, ...]
    core_share: float = 0.0
    rest_seconds: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether the measurements of the links made sense."""
        links = (self.network, self.node)
        return all(each.bytes_per_second > 0 and isfinite(each.latency_seconds) for each in links)


@dataclass(frozen=True)
class Prediction:
    """A predicted step.

    Attributes:
        seconds: step time.
    """

    choice: tuple[int, ...]
    seconds: float
    sent_bytes: float


def runs_of(bucket: Bucket, choice: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the method and the first and last parameter of each run of a bucket."""
    runs, first = [], 0
    chosen = [choice[i] if i < len(choice) else 0 for i in bucket.parameters]
    for method, members in groupby(chosen):
        last = first + len(list(members)) - 1
        runs.append((method, first, last))
        first = last + 1
    return runs


def run_seconds(measured: Measured, method: Method, indices: Sequence[int]) -> float:
    """Return the time of a run."""
    nbytes = sum(method.gradients[index].nbytes for index in indices) / measured.owners
    latency = method.calls * measured.network.latency_seconds
    sending = latency + nbytes / measured.network.bytes_per_second
    return sending + _computing_seconds(measured, method, indices)


def _computing_seconds(measured: Measured, method: Method, indices: Sequence[int]) -> float:
    """Return how long a rank computes for a run."""
    seconds = sum(method.gradients[index].seconds for index in indices)
    return method.seconds + seconds / measured.owners


def predict(measured: Measured, plan: BucketPlan, choice: Sequence[int]) -> Prediction:
    """Predict a step."""
    finished = moved = delay = 0.0
    for bucket, ready in zip(plan.buckets, measured.ready_seconds, strict=True):
        finished = max(ready + delay, finished) + measured.node.seconds(bucket.nbytes)
        computing = -_computing_seconds(measured, measured.methods[0], bucket.parameters)
        for number, first, last in runs_of(bucket, choice):
            method, indices = measured.methods[number], bucket.parameters[first : last + 1]
            finished += run_seconds(measured, method, indices)
            computing += _computing_seconds(measured, method, indices)
            moved += sum(method.gradients[index].nbytes for index in indices)
        delay += measured.core_share * computing
    # An all-reduce sends 2 (n - 1) / n of its elements.
    sent = moved * 2 * (measured.nodes - 1) / measured.nodes
    return Prediction(tuple(choice), finished + measured.rest_seconds, sent)


def as_in_steps(
    measured: Measured, plan: BucketPlan, reduced_seconds: float, step_seconds: float
) -> Measured:
    """Return measurements by which the average takes as long as in the steps that were measured.

    Ranks that compute have less time to move data than when the links were measured.
    """
    alone = sum(
        measured.node.seconds(bucket.nbytes)
        + run_seconds(measured, measured.methods[0], bucket.parameters)
        for bucket in plan.buckets
    )
    factor = max(1.0, reduced_seconds / alone)
    network, node = _slower(measured.network, factor), _slower(measured.node, factor)
    measured = replace(measured, network=network, node=node)
    average = predict(measured, plan, [0] * len(plan.specs))
    return replace(measured, rest_seconds=max(0.0, step_seconds - average.seconds))


def _slower(cost: AllreduceCost, factor: float) -> AllreduceCost:
    return AllreduceCost(factor * cost.latency_seconds, cost.bytes_per_second / factor)
