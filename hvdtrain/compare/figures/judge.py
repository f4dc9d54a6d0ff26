"""Times of contenders that took turns: medians, intervals and what can be said of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

__all__ = [
    "DIFFERS_FROM_ITSELF",
    "NO_DIFFERENCE",
    "Ratio",
    "Timing",
    "judge",
    "ratio_to",
    "time_steps",
    "without_start",
]

# The first steps open connections, and make memory and plans.
_MOST_FIRST_STEPS = 10
# A smaller difference is not reported, because it does not matter.
_SMALLEST_RATIO = 1.02
NO_DIFFERENCE = "no difference"
DIFFERS_FROM_ITSELF = "differs from itself"


@dataclass(frozen=True)
class Timing:
    """The time of a step.

    Attributes:
        seconds: median of the medians of the repeats.
        low: lower end of the interval: the lower quartile of all steps, or the smallest median of a
            repeat if that is smaller.
        high: upper end: the upper quartile, or the largest median.
        repeats: median of each repeat.
    """

    seconds: float
    low: float
    high: float
    repeats: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """The time of a contender relative to another one's in the same repeats.

    Attributes:
        middle: median of the ratios of the repeats.
        low: smallest ratio.
        high: largest ratio.
    """

    middle: float
    low: float
    high: float


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
    """Return how a contender compares with another one, repeat by repeat.

    Args:
        base: the other one.
        other: the contender.

    Raises:
        ValueError: the numbers of repeats differ.
    """
    pairs = zip(base.repeats, other.repeats, strict=True)
    ratios = [seconds / of_base for of_base, seconds in pairs]
    return Ratio(median(ratios), min(ratios), max(ratios))


def judge(base: Timing, other: Timing, same: bool) -> str:
    """Return what can be said of a contender: two differ if their intervals do not overlap.

    Args:
        base: the first contender.
        other: the contender.
        same: whether both are the same code, which measures the noise.
    """
    overlap = base.low <= other.high and other.low <= base.high
    ratio = ratio_to(base, other).middle
    if overlap or max(ratio, 1 / ratio) < _SMALLEST_RATIO:
        return NO_DIFFERENCE
    if same:
        return DIFFERS_FROM_ITSELF
    return "slower" if ratio > 1 else "faster"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
