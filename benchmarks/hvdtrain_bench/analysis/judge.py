"""Figures with their spread, comparisons, when a difference is noise, and what has a target.

The only judge: `bench` and `compare` say the same of the same times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, comb, exp, log, sqrt
from statistics import fmean, mean, median, quantiles, stdev

from hvdtrain_bench.harness.results import Case, Result

CONFIDENCE = 0.99
# A smaller difference is not reported, however certain it is, because it does not matter.
SMALLEST_RATIO = 1.02
# Student's t for a confidence of 99 %, by the number of repeats.
STUDENT = {3: 9.925, 4: 5.841, 5: 4.604, 6: 4.032, 7: 3.707}
TOO_FEW_REPEATS, WITHIN_THE_NOISE = "too few repeats", "within the noise"
DIFFERS_FROM_ITSELF = "DIFFERS FROM ITSELF"


@dataclass(frozen=True)
class Comparison:
    """How one measurement compares with another that took turns with it."""

    ratio: float  # the median of the repeats' ratios, and their quartiles
    low: float
    high: float
    interval: tuple[float, float] | None  # that holds the true ratio; None with too few repeats
    differs: bool

    @property
    def size(self) -> float:
        """Size of the difference, whatever its sign; 1 is none."""
        return max(self.ratio, 1 / self.ratio)

    @property
    def verdict(self) -> str:
        """What can be said of the other one."""
        if self.differs:
            return "slower" if self.ratio > 1 else "faster"
        return TOO_FEW_REPEATS if self.interval is None else WITHIN_THE_NOISE

    @property
    def verdict_of_same_code(self) -> str:
        """What can be said of the other one if it is the same code."""
        if self.differs:
            return DIFFERS_FROM_ITSELF
        return f"same code, {TOO_FEW_REPEATS if self.interval is None else 'no difference'}"


def compare(
    base: Sequence[float], other: Sequence[float], noise: float = SMALLEST_RATIO
) -> Comparison:
    """Compare two contenders that took turns, repeat by repeat.

    The ratio differs from 1 if its interval leaves 1 out and it is larger than the noise, which is
    what the same code shows, and at least SMALLEST_RATIO.
    """
    ratios = paired_ratios(base, other)
    low, high = spread(ratios)
    middle, interval = median(ratios), ratio_interval(ratios)
    certain = interval is not None and not interval[0] <= 1.0 <= interval[1]
    differs = certain and max(middle, 1 / middle) > max(noise, SMALLEST_RATIO)
    return Comparison(middle, low, high, interval, differs)


def noise_of(values: Mapping[str, Sequence[float]], same: Mapping[str, str]) -> float:
    """Return the largest ratio without a meaning: what code shows that ran under two names."""
    sizes = (compare(values[first], values[again]).size for again, first in same.items())
    return max([SMALLEST_RATIO, *sizes])


def paired_ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return other / base of each repeat."""
    if len(base) != len(other) or not base:
        raise ValueError(f"repeats come in pairs, got {len(base)} and {len(other)}")
    return [b / a for a, b in zip(base, other, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the true ratio with a confidence of 99 %.

    That of the median, whatever the distribution. No such interval exists for fewer than 8 repeats:
    Student's t of the logarithms then supposes a normal distribution. Logarithms of the same code's
    ratios are symmetric, and outliers make such an interval wider, so it rarely errs, either.
    """
    if len(ratios) not in STUDENT:
        return median_interval(ratios)
    logs = [log(ratio) for ratio in ratios]
    middle, error = fmean(logs), STUDENT[len(logs)] * stdev(logs) / sqrt(len(logs))
    return exp(middle - error), exp(middle + error)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that holds the true median with at least CONFIDENCE.

    The number of values below the true median is binomial, whatever their distribution, so
    P(x_(k) <= median <= x_(n+1-k)) = 1 - 2 * sum_{i<k} C(n, i) / 2^n; the largest such k is taken.
    """
    ordered, count = sorted(values), len(values)
    left_out = 0
    tail = 2 * comb(count, 0) / 2**count
    while tail <= 1 - CONFIDENCE and left_out < (count + 1) // 2:
        left_out += 1
        tail += 2 * comb(count, left_out) / 2**count
    if left_out == 0:
        return None
    return ordered[left_out - 1], ordered[count - left_out]


@dataclass(frozen=True)
class Figure:
    label: str
    number: float  # the median, and the quartiles
    low: float
    high: float
    unit: str  # "us", "ms", "s", "MB", "x", "%", or "" for a loss
    verdict: str = ""
    met: bool | None = None  # whether the target is met, if there is one


def figure_of(
    label: str, values: Sequence[float], unit: str, target: float | None = None
) -> Figure:
    """Return the figure of repeated measurements, whose median must be less than the target."""
    low, high = spread(values)
    met = None if target is None else median(values) < target
    verdict = "" if target is None else f"target: below {target:g} {unit}"
    return Figure(label, median(values), low, high, unit, verdict, met)


# Points of a training: steps, seconds of training, loss of the test samples.
Curve = Sequence[Sequence[float]]


@dataclass(frozen=True)
class LossSummary:
    """The losses that one exchange reaches on one task."""

    name: str
    mean: float  # mean of the last losses over the seeds
    low: float  # lowest last loss of a seed
    high: float  # highest last loss of a seed
    difference: float  # mean difference from the base with the same seed; 0 for the base
    # "within the seeds" if the mean lies between the lowest and the highest loss of the base,
    # otherwise "lower" or "higher".
    verdict: str
    equal_time: float  # mean loss after the time that the fastest exchange needs for all steps
    seconds: float  # median time of all steps


def compare_losses(
    curves: Mapping[str, Sequence[Curve]], base: str
) -> tuple[float, list[LossSummary]]:
    """Return the seconds that the fastest exchange needs, and a summary for each exchange."""
    last = {name: [curve[-1][2] for curve in of_seeds] for name, of_seeds in curves.items()}
    seconds = {name: median(curve[-1][1] for curve in of) for name, of in curves.items()}
    shortest = min(seconds.values())
    found = []
    for name, losses in last.items():
        pairs = zip(losses, last[base], strict=True)
        verdict = "lower" if mean(losses) < min(last[base]) else "higher"
        if min(last[base]) <= mean(losses) <= max(last[base]):
            verdict = "within the seeds"
        summary = LossSummary(
            name=name,
            mean=mean(losses),
            low=min(losses),
            high=max(losses),
            difference=mean(own - other for own, other in pairs),
            verdict=verdict if name != base else "",
            equal_time=mean(loss_after(curve, shortest) for curve in curves[name]),
            seconds=seconds[name],
        )
        found.append(summary)
    return shortest, found


def loss_after(curve: Curve, seconds: float) -> float:
    """Return the loss at a time, on the line between two points; after the last it remains."""
    for (_, before, first), (_, after, second) in pairwise(curve):
        if seconds <= after:
            return first + (second - first) * (seconds - before) / (after - before)
    return curve[-1][2]


_NAMED_MICROSECONDS = 8.0
_IDLE_PERCENT = 3.0
_STALL_MILLISECONDS = 50.0
_LOOP_RATIO = 1.03
_NAMED_BYTES, _MEDIUM_BYTES, _LARGE_BYTES = 1 << 10, 4 << 20, 64 << 20
# The median and the longest step without a checkpoint, and those while one is written.
USUAL, LONGEST_WITHOUT = "no checkpoint", "no checkpoint, longest"
MEAN, LONGEST = "checkpoint, mean", "checkpoint, longest"
BY_HAND, BUILT_IN = "by hand", "hvdtrain train"
NO_COMMUNICATION = "no communication"
AVERAGE, AVERAGE_AGAIN = "average", "average again"
ALONE, WHOLE = "one rank alone", "one rank, whole batch"
HVDTRAIN, FUSED, SHARDED = "hvdtrain", "hvdtrain, fused", "hvdtrain, sharded"
HVDTRAIN_AGAIN = "hvdtrain again"
OPTIMIZER = "hvdtrain, optimizer of Keras"
FUSED_LIMIT = "no communication, fused"
DDP_COPIES = "DDP, batched copies"
DEEPSPEED = "DDP, DeepSpeed's all-reduce"
REPLICATE = "replicate"
KILLS, ELASTIC_STEPS = "kills", "elastic-steps"
OWN = "hvdtrain"  # how the names of its jobs that lose a process begin
NEW_STEP, NEXT_STEP = "kill to the end of the next new step", "kill to the end of the next step"
NOT_ELASTIC, NOT_ELASTIC_AGAIN, ELASTIC = "not elastic", "not elastic again", "elastic"
_MEDIAN_SECONDS, _LATE_SECONDS, _ELASTIC_RATIO = 1.0, 3.0, 1.01
_LATE = 0.95


@dataclass(frozen=True)
class ComparedContender:
    name: str
    median: float
    comparison: Comparison | None
    verdict: str


@dataclass(frozen=True)
class Efficiency:
    """How efficiently a step uses n ranks: medians over the repeats, 1 is ideal."""

    weak: float  # time of one rank alone / time, with the same batch on every rank
    strong: float  # time of one rank with the whole batch / (n * time)
    limit: float  # time of n ranks without communication / time


def rows(case: Case) -> list[ComparedContender]:
    """Compare every contender of a case with its base."""
    return compared(case.values, case.base, _same(case))


def compared(
    values: Mapping[str, Sequence[float]], base: str, same: Mapping[str, str]
) -> list[ComparedContender]:
    """Compare all contenders with the base, if there is one; `same` names again who took part."""
    noise = noise_of(values, same)
    found = []
    for name, own in values.items():
        comparison, verdict = None, ""
        if base and name != base:
            if same.get(name) == base:
                comparison = compare(values[base], own)
                verdict = comparison.verdict_of_same_code
            else:
                comparison = compare(values[base], own, noise)
                verdict = comparison.verdict
        found.append(ComparedContender(name, median(own), comparison, verdict))
    return found


def is_trustworthy(case: Case) -> bool:
    """Return whether the same code, run under two names, showed no difference."""
    if not case.again:
        return True
    return not compare(case.values[case.base], case.values[case.again]).differs


def efficiencies(case: Case, ranks: int) -> dict[str, Efficiency]:
    """Return the efficiency of each contender on all ranks; empty if they take no steps."""
    if WHOLE not in case.values:
        return {}
    bases = (ALONE, WHOLE, NO_COMMUNICATION)
    found = {}
    for name, own in case.values.items():
        if name not in bases:
            weak, strong, limit = (median(paired_ratios(own, case.values[base])) for base in bases)
            found[name] = Efficiency(weak, strong / ranks, limit)
    return found


def figures(result: Result) -> list[Figure]:
    kinds: dict[str, Callable[[Result], Iterator[Figure]]] = {
        "collectives": _of_collectives,
        "steps": _of_steps,
        "idle": _of_idle,
        "checkpoint": _of_checkpoint,
        "exchange": _of_exchanges,
        "exchange-loss": _of_losses,
        "loop": partial(_against, BY_HAND, {BUILT_IN: _LOOP_RATIO}),
        KILLS: _of_kills,
        ELASTIC_STEPS: partial(
            _against, NOT_ELASTIC, {NOT_ELASTIC_AGAIN: None, ELASTIC: _ELASTIC_RATIO}
        ),
    }
    return list(kinds[result.kind](result)) if result.kind in kinds else []


def _same(case: Case) -> dict[str, str]:
    return {case.again: case.base} if case.again else {}


def _of_collectives(result: Result) -> Iterator[Figure]:
    for case in result.cases:
        nbytes = case.about["bytes"]
        for peer in ("mpi4py Allreduce", "Horovod allreduce_"):
            yield from _ratios(case, peer, ["hvd.allreduce_"])
        if "tensors" in case.about:
            yield from _ratios(case, "hvdtrain", ["Horovod"])
        elif "hvdtrain, busy" in case.values:
            yield from _ratios(case, "hvdtrain", ["hvdtrain, busy"])
            yield from _ratios(case, "Horovod", ["Horovod, busy"])
        elif nbytes == _NAMED_BYTES:
            values = [1e6 * seconds for seconds in case.values["hvd.allreduce"]]
            yield figure_of(f"{case.name}: hvd.allreduce", values, "us", _NAMED_MICROSECONDS)
            yield from _ratios(case, "hvd.allreduce", ["Horovod allreduce"])
        elif nbytes == _MEDIUM_BYTES:
            for name in ("hvd.allreduce", "engine mpi, its memory"):
                yield from _ratios(case, name, ["mpi4py Allreduce", "Horovod allreduce"])
            yield from _ratios(case, "engine mpi", ["engine mpi, deterministic"])
        elif nbytes == _LARGE_BYTES:
            ways = ["engine mpi, its memory", "hvd.allreduce_", "hvd.allreduce"]
            yield from _ratios(case, "memcpy, all ranks at once", ways)


def _of_steps(result: Result) -> Iterator[Figure]:
    for case in result.cases:
        yield from _ratios(case, NO_COMMUNICATION, [HVDTRAIN, OPTIMIZER, SHARDED])
        yield from _ratios(case, FUSED_LIMIT, [FUSED, SHARDED])
        for peer in ("DDP", DDP_COPIES, DEEPSPEED, REPLICATE, "Horovod"):
            yield from _ratios(case, peer, [HVDTRAIN, OPTIMIZER, SHARDED])


def _of_idle(result: Result) -> Iterator[Figure]:
    for case in result.cases:
        for name, values in case.values.items():
            target = _IDLE_PERCENT if name.startswith("hvdtrain") else None
            yield figure_of(f"{name}: share of a core", values, "%", target)


def _of_checkpoint(result: Result) -> Iterator[Figure]:
    for case in result.cases:
        values = [case.values[name] for name in (USUAL, LONGEST_WITHOUT, MEAN, LONGEST)]
        usual, without, mean, longest = ([1e3 * v for v in of_repeats] for of_repeats in values)
        steps = case.about["steps"]

        def beyond(times: Sequence[float], usual: Sequence[float] = usual) -> list[float]:
            return [time - base for time, base in zip(times, usual, strict=True)]

        in_all = [n * extra for n, extra in zip(steps, beyond(mean), strict=True)]
        stall = beyond(longest)
        yield figure_of(f"{case.name}: longest step - usual", stall, "ms", _STALL_MILLISECONDS)
        yield figure_of(f"{case.name}: the same without a checkpoint", beyond(without), "ms")
        yield figure_of(f"{case.name}: all that a checkpoint takes of training", in_all, "ms")


def _of_exchanges(result: Result) -> Iterator[Figure]:
    for case in result.cases:
        for name, nbytes in case.about["sent_bytes"].items():
            label = f"{case.name}: {name}: sent by a host per step"
            yield Figure(label, nbytes / 1e6, nbytes / 1e6, nbytes / 1e6, "MB")
            if name not in (NO_COMMUNICATION, AVERAGE_AGAIN):
                yield from _ratios(case, NO_COMMUNICATION, [name])


def _of_losses(result: Result) -> Iterator[Figure]:
    for case in result.cases:
        seconds, found = compare_losses(case.about["curves"], AVERAGE)
        for summary in found:
            label = f"{case.name}: {summary.name}"
            low, high, verdict = summary.low, summary.high, summary.verdict
            yield Figure(f"{label}: loss at the end", summary.mean, low, high, "", verdict)
            early = summary.equal_time
            yield Figure(f"{label}: loss after {seconds:.3g} s", early, early, early, "")


def _of_kills(result: Result) -> Iterator[Figure]:
    for case in result.cases:
        if case.name.startswith(OWN):
            values = case.values[NEW_STEP]
            yield figure_of(f"{case.name}: {NEW_STEP}", values, "s", _MEDIAN_SECONDS)
            label = f"{case.name}: {100 * _LATE:.0f} % of kills"
            yield figure_of(label, [late_of(values)], "s", _LATE_SECONDS)


def late_of(values: Sequence[float]) -> float:
    """Return what 95 % of the values do not exceed."""
    return sorted(values)[ceil(_LATE * len(values)) - 1]


def _against(base: str, others: Mapping[str, float | None], result: Result) -> Iterator[Figure]:
    """Yield the times of others in those of a base, with what they must stay below, if anything."""
    for case in result.cases:
        for name, target in others.items():
            ratios = paired_ratios(case.values[base], case.values[name])
            yield figure_of(f"{case.name}: {name} / {base}", ratios, "x", target)


def _ratios(case: Case, base: str, others: Sequence[str]) -> Iterator[Figure]:
    """Compare contenders with a base, if both were measured."""
    noise = noise_of(case.values, _same(case))
    for other in others:
        if base in case.values and other in case.values:
            found = compare(case.values[base], case.values[other], noise)
            label = f"{case.name}: {other} / {base}"
            yield Figure(label, found.ratio, found.low, found.high, "x", found.verdict)
