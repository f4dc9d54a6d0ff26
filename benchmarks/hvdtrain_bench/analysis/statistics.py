"""Figures with their spread, paired comparisons, and when a difference is noise. Pure.

The only judge: `bench` and `compare` say the same of the same times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, exp, log, sqrt
from statistics import fmean, median, quantiles, stdev

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


def median_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Return an interval that holds the true median with at least this confidence.

    The number of values below the true median is binomial, whatever their distribution, so
    P(x_(k) <= median <= x_(n+1-k)) = 1 - 2 * sum_{i<k} C(n, i) / 2^n; the largest such k is taken.
    """
    ordered, count = sorted(values), len(values)
    left_out = 0
    tail = 2 * comb(count, 0) / 2**count
    while tail <= 1 - confidence and left_out < (count + 1) // 2:
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
