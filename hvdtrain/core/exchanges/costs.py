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

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from math import isfinite

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, ExchangeState, FilledBucket, StepInfo
from hvdtrain.core.gradients.plan import AllreduceCost, Bucket, BucketPlan, size_text


@dataclass(frozen=True, eq=False)
class Measured:
    """What a prediction needs to know, equal on all ranks.

    Exchanges, the average first, have names, and of each run, however small, a number of calls and
    a computation. Of each gradient, if one owner has all of it, they have a computation and a
    number of bytes, [exchanges, gradients].
    """

    nodes: int
    owners: int
    network: AllreduceCost
    node: AllreduceCost
    ready_seconds: Sequence[float]
    names: Sequence[str]
    calls: Sequence[float]
    run_seconds: Sequence[float]
    seconds: HostArray
    nbytes: HostArray
    core_share: float = 0.0
    rest_seconds: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether the measurements of the links made sense."""
        links = (self.network, self.node)
        return all(each.bytes_per_second > 0 and isfinite(each.latency_seconds) for each in links)

    def computing(self, number: int, indices: Sequence[int]) -> float:
        """Return how long a rank computes for a run."""
        seconds = float(self.seconds[number, list(indices)].sum())
        return self.run_seconds[number] + seconds / self.owners

    def run(self, number: int, indices: Sequence[int]) -> float:
        """Return how long a run of an exchange takes."""
        nbytes = float(self.nbytes[number, list(indices)].sum()) / self.owners
        latency = self.calls[number] * self.network.latency_seconds
        sending = latency + nbytes / self.network.bytes_per_second
        return sending + self.computing(number, indices)


@dataclass(frozen=True)
class Prediction:
    """A predicted step."""

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


def predict(measured: Measured, plan: BucketPlan, choice: Sequence[int]) -> Prediction:
    finished = moved = delay = 0.0
    for bucket, ready in zip(plan.buckets, measured.ready_seconds, strict=True):
        finished = max(ready + delay, finished) + measured.node.seconds(bucket.nbytes)
        computing = -measured.computing(0, bucket.parameters)
        for number, first, last in runs_of(bucket, choice):
            indices = bucket.parameters[first : last + 1]
            finished += measured.run(number, indices)
            computing += measured.computing(number, indices)
            moved += float(measured.nbytes[number, list(indices)].sum())
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
        measured.node.seconds(bucket.nbytes) + measured.run(0, bucket.parameters)
        for bucket in plan.buckets
    )
    factor = max(1.0, reduced_seconds / alone)
    network, node = _slower(measured.network, factor), _slower(measured.node, factor)
    measured = replace(measured, network=network, node=node)
    average = predict(measured, plan, [0] * len(plan.specs))
    return replace(measured, rest_seconds=max(0.0, step_seconds - average.seconds))


def _slower(cost: AllreduceCost, factor: float) -> AllreduceCost:
    return AllreduceCost(factor * cost.latency_seconds, cost.bytes_per_second / factor)


# A step must become shorter by more than this: predictions are not more exact.
_LEAST_GAIN = 0.05


def predictions(measured: Measured, plan: BucketPlan) -> list[Prediction]:
    """Return the average, each other method where it is shorter, and all of them together."""
    count = len(measured.names)
    allowed = [[0], *([0, number] for number in range(1, count))]
    if count > 2:
        allowed.append(list(range(count)))
    found = [predict(measured, plan, _shortest(measured, plan, numbers)) for numbers in allowed]
    first = {each.choice: each for each in reversed(found)}
    return [each for each in found if first[each.choice] is each]


def best(found: Sequence[Prediction]) -> Prediction:
    """Return the prediction of the shortest step, or the first one if no other gains 5 %."""
    shortest = min(found, key=lambda each: each.seconds)
    return shortest if shortest.seconds < (1 - _LEAST_GAIN) * found[0].seconds else found[0]


def _shortest(measured: Measured, plan: BucketPlan, allowed: Sequence[int]) -> list[int]:
    """Return the method of each gradient with which each bucket takes the least time."""
    choice = [0] * len(plan.specs)
    for bucket in plan.buckets:
        chosen = _shortest_of_bucket(measured, bucket.parameters, allowed)
        for index, method in zip(bucket.parameters, chosen, strict=True):
            choice[index] = method
    return choice


def _shortest_of_bucket(
    measured: Measured, indices: Sequence[int], allowed: Sequence[int]
) -> list[int]:
    """Return the method of each gradient of a bucket, by dynamic programming over its runs."""
    starts = {n: measured.run(n, ()) for n in allowed}
    # Time and methods of the gradients so far, by the method of the last one.
    paths: dict[int, tuple[float, list[int]]] = {}
    for index in indices:
        least = min(paths.values(), default=(0.0, []))
        following = {}
        for number in allowed:
            own = measured.run(number, [index])
            begun = (least[0] + own, least[1])
            if number in paths:
                seconds, methods = paths[number]
                begun = min(begun, (seconds + own - starts[number], methods))
            following[number] = (begun[0], [*begun[1], number])
        paths = following
    return min(paths.values(), default=(0.0, []))[1]


_CHOICE = "auto choice"


@dataclass(frozen=True)
class Chosen:
    """Chosen exchanges; a step's seconds, if known: `predicted` with them, average's `before`."""

    methods: tuple[int, ...]
    ranks: int
    exchanges: Mapping[int, Exchange]
    predicted: float | None = None
    before: float | None = None

    @classmethod
    def begin(
        cls,
        methods: Sequence[int],
        ranks: int,
        candidates: Sequence[Exchange],
        predicted: float | None = None,
        before: float | None = None,
    ) -> Chosen:
        used = {number: deepcopy(candidates[number]) for number in sorted({0, *methods})}
        return cls(tuple(methods), ranks, used, predicted, before)

    @classmethod
    def restored(cls, state: ExchangeState, candidates: Sequence[Exchange]) -> Chosen | None:
        """Return a choice as it was when state() was called; None if there was none."""
        if _CHOICE not in state.shared:
            return None
        ranks, *methods = state.shared[_CHOICE].tolist()
        chosen = cls.begin(methods, ranks, candidates)
        for number, exchange in chosen.exchanges.items():
            shared, own = (_part(number, arrays) for arrays in (state.shared, state.own))
            exchange.load(ExchangeState(shared, own))
        return chosen

    def carried_to(self, before: BucketPlan, plan: BucketPlan) -> Chosen:
        """Return the same choice for the parameters of another plan; new ones are averaged."""
        specs = zip(before.specs, self.methods, strict=False)
        methods = {spec.name: method for spec, method in specs}
        return replace(self, methods=tuple(methods.get(spec.name, 0) for spec in plan.specs))

    def state(self) -> ExchangeState:
        """Return a copy of the choice and of the state of its exchanges."""
        shared: dict[str, HostArray] = {_CHOICE: np.array([self.ranks, *self.methods], np.int64)}
        own: dict[str, HostArray] = {}
        for number, exchange in self.exchanges.items():
            state = exchange.state()
            shared |= {f"{number}.{name}": array for name, array in state.shared.items()}
            own |= {f"{number}.{name}": array for name, array in state.own.items()}
        return ExchangeState(shared, own)

    def prepare(self, plan: BucketPlan) -> None:
        for exchange in self.exchanges.values():
            exchange.prepare(plan)

    @collective
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        for method, first, last in runs_of(bucket.layout, self.methods):
            self.exchanges[method].reduce(bucket.section(first, last), info, communicators)

    def end(self, info: StepInfo) -> None:
        for exchange in self.exchanges.values():
            exchange.end(info)


def _part(number: int, arrays: Mapping[str, HostArray]) -> dict[str, HostArray]:
    """Return the arrays of the exchange of a number, by their own names."""
    start = f"{number}."
    return {n.removeprefix(start): array for n, array in arrays.items() if n.startswith(start)}


def prediction_lines(
    measured: Measured, found: Sequence[Prediction], now_seconds: float | None
) -> list[str]:
    link = measured.network
    now = "" if now_seconds is None else f"; a step takes {_milliseconds(now_seconds)} now"
    rows = [("", "sent by a node", "step")]
    for each in found:
        names = [measured.names[number] for number in sorted(set(each.choice), reverse=True)]
        sent = size_text(round(each.sent_bytes))
        rows.append((" and ".join(names), sent, _milliseconds(each.seconds)))
    width = max(len(name) for name, _, _ in rows)
    return [
        f"between {measured.nodes} nodes an all-reduce starts in {1e6 * link.latency_seconds:.0f} "
        f"us and runs at {link.bytes_per_second / 1e9:.3g} GB/s{now}; predictions:",
        *(f"  {name:{width}}  {sent:>14}  {step:>9}" for name, sent, step in rows),
    ]


def choice_line(names: Sequence[str], plan: BucketPlan, chosen: Sequence[int]) -> str:
    parts = []
    total = sum(spec.count for spec in plan.specs)
    for number in sorted(set(chosen)):
        own = [spec.count for spec, own in zip(plan.specs, chosen, strict=True) if own == number]
        share = f"{100 * sum(own) / total:.1f} % of the elements"
        gradients = f"{len(own)} gradient{'s' * (len(own) != 1)}"
        parts.append(f"{names[number]} for {gradients} with {share}")
    return f"chosen: {', '.join(parts)}" if len(parts) > 1 else f"chosen: {names[chosen[0]]}"


def outcome_line(seconds: float, predicted: float, before: float | None) -> str:
    average = "" if before is None else f", {_milliseconds(before)} with the average"
    return f"a step takes {_milliseconds(seconds)}, predicted {_milliseconds(predicted)}{average}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
