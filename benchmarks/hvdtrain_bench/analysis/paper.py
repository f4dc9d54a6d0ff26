"""Scaling on paper: what a step costs on any number of ranks, from a few figures. Pure.

Gradients of bucket k = 1..K are ready r_k after the start of backward, and are copied into it,
which takes C S_k / S. Buckets share one channel:

    d_k = sum_{j<=k} C S_j / S + c sum_{j<k} T_j
    s_k = max(r_k + d_k, f_{k-1}),  f_k = s_k + T_k,  T_k = T(n, S_k)
    T_step = T_fwd + max(T_bwd + d_K, f_K) + T_opt + sigma e_n

c is the share of a core that computes which communication takes away, and e_n the expected
maximum of n standard normal numbers: a step waits for its slowest rank. One rank copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, median

from hvdtrain_bench.analysis.link import Link, hierarchical_seconds

__all__ = ["Prediction", "Work", "even_work", "jitter_seconds", "predict", "step_seconds"]


@dataclass(frozen=True)
class Work:
    """The work of one rank in a step.

    Attributes:
        name: name of the model.
        forward_seconds: time until the loss is computed.
        backward_seconds: time of the backward pass without communication.
        optimizer_seconds: time of the optimizer's step.
        buckets: size in bytes of each bucket, in the order of reduction, and when it is ready in
            seconds after the start of backward.
        jitter_seconds: standard deviation of the step time between ranks.
        copy_seconds: time to copy all gradients into their buckets, in the computing thread.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    buckets: tuple[tuple[int, float], ...]
    jitter_seconds: float = 0.0
    copy_seconds: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """Step time of one rank alone."""
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class Prediction:
    """A predicted step on `ranks` ranks with the same batch each.

    Attributes:
        ranks: number of ranks.
        seconds: step time.
        efficiency: step time on one rank / seconds.
        exposed_seconds: time in which ranks only wait for communication.
    """

    ranks: int
    seconds: float
    efficiency: float
    exposed_seconds: float


def even_work(
    name: str,
    phases: tuple[float, float, float],
    nbytes: int,
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> Work:
    """Return the work of a model whose gradients become ready evenly through the backward pass.

    Args:
        name: name of the model.
        phases: seconds of forward, backward and optimizer.
        nbytes: size of all gradients.
        bucket_bytes: size of a bucket.
        first_bucket_bytes: size of the first bucket.
    """
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

    Args:
        times: seconds of each step, for each rank.
    """
    behind = median(max(step) - mean(step) for step in zip(*times, strict=True))
    return behind / _expected_maximum(len(times)) if len(times) > 1 else 0.0


def step_seconds(
    work: Work, ranks: int, allreduce: Callable[[float], float], core_share: float = 0.0
) -> float:
    """Return the time of a step on `ranks` ranks (see the module).

    Args:
        work: work of one rank.
        ranks: number of ranks.
        allreduce: returns the seconds of an all-reduce of so many bytes.
        core_share: see Link.
    """
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


def predict(
    work: Work,
    ranks: Sequence[int],
    network: Link,
    node: Link | None = None,
    ranks_per_node: int = 1,
) -> list[Prediction]:
    """Predict weak scaling: every rank keeps its batch.

    Args:
        work: work of one rank.
        ranks: numbers of ranks, in any order.
        network: link between nodes.
        node: link within a node; needed with more than one rank per node.
        ranks_per_node: number of ranks that share a network card.
    """
    alone = step_seconds(work, 1, lambda _: 0.0)
    predictions = []
    for count in ranks:

        def allreduce(nbytes: float, count: int = count) -> float:
            return hierarchical_seconds(count, ranks_per_node, nbytes, node or network, network)

        seconds = step_seconds(work, count, allreduce, network.core_share if count > 1 else 0.0)
        without = step_seconds(work, count, lambda _: 0.0)
        predictions.append(Prediction(count, seconds, alone / seconds, seconds - without))
    return predictions


def _expected_maximum(count: int) -> float:
    """Return the mean of the largest of `count` standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0
