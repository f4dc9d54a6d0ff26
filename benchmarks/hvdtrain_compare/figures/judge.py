"""Times of contenders that took turns: medians, intervals and what can be said of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, median, quantiles, stdev

# The first steps open connections, and make memory and plans.
_MOST_FIRST_STEPS = 10
# A smaller difference is not reported, because it does not matter.
_SMALLEST_RATIO = 1.02
_FEWEST_REPEATS = 3
# Student's t: a chance of 5 % with three repeats, of 1 % with five, and of less with more.
_STANDARD_ERRORS = 4.3
TOO_FEW_REPEATS = "too few repeats"
WITHIN_THE_NOISE = "within the noise"


@dataclass(frozen=True)
class Timing:
    """The time of a step.

    Attributes:
        seconds: median of the medians of the repeats.
    """

    seconds: float
    low: float
    high: float
    repeats: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """The time of a contender relative to another one's in the same repeats."""

    middle: float
    low: float
    high: float
    repeats: tuple[float, ...]


def without_start(seconds: Sequence[float]) -> list[float]:
    """Return the times of steps without those of the first ones: ten, or a quarter of a few."""
    return list(seconds[min(_MOST_FIRST_STEPS, len(seconds) // 4) :])


def time_steps(repeats: Sequence[Sequence[float]]) -> Timing:
    """Summarize the steps of all repeats.

    Args:
        repeats: times of the steps of each repeat, in seconds; none is empty.
    """
    medians = [median(steps) for steps in repeats]
    low, high = _quartiles([seconds for steps in repeats for seconds in steps])
    return Timing(median(medians), min(low, *medians), max(high, *medians), tuple(medians))


def ratio_to(base: Timing, other: Timing) -> Ratio:
    """Return how a contender compares with another one, repeat by repeat."""
    pairs = zip(base.repeats, other.repeats, strict=True)
    ratios = tuple(seconds / of_base for of_base, seconds in pairs)
    return Ratio(median(ratios), min(ratios), max(ratios), ratios)


def noise_of(same: Sequence[Ratio]) -> float:
    """Return the largest ratio without a meaning, at least 1.02."""
    return max([_SMALLEST_RATIO, *(max(ratio.high, 1 / ratio.low) for ratio in same)])


def judge(ratio: Ratio, noise: float) -> str:
    """Return what can be said of a contender.

    It is slower or faster if the ratios of all repeats say so, each beyond the noise, and if their
    mean is farther from 1 than repeats that vary as these do would be by chance.
    """
    if len(ratio.repeats) < _FEWEST_REPEATS:
        return TOO_FEW_REPEATS
    logs = [log(one) for one in ratio.repeats]
    by_chance = _STANDARD_ERRORS * stdev(logs) / sqrt(len(logs))
    if abs(fmean(logs)) > by_chance:
        if ratio.low > noise:
            return "slower"
        if ratio.high < 1 / noise:
            return "faster"
    return WITHIN_THE_NOISE


def judge_same(ratio: Ratio) -> str:
    """Return what is said of the same code, whose ratio is nothing but noise."""
    few = len(ratio.repeats) < _FEWEST_REPEATS
    return f"same code, {TOO_FEW_REPEATS if few else 'no difference'}"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
