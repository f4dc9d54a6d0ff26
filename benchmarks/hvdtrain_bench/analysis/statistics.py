"""Figures with their spread, paired comparisons, and when a difference is noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median, quantiles

CONFIDENCE = 0.99
# A smaller difference is not reported, however certain it is, because it does not matter.
SMALLEST_RATIO = 1.02


@dataclass(frozen=True)
class Comparison:
    """How one measurement compares with another that took turns with it.

    Attributes:
        ratio: median of the repeats' ratios.
        low: lower quartile of the ratios.
        high: upper quartile of the ratios.
        interval: interval that contains the true median with a confidence of 99 %; None with too
            few repeats (fewer than 8).
    """

    ratio: float
    low: float
    high: float
    interval: tuple[float, float] | None
    differs: bool

    @property
    def size(self) -> float:
        """Size of the difference, whatever its sign; 1 is none."""
        return max(self.ratio, 1 / self.ratio)


def compare(
    base: Sequence[float], other: Sequence[float], noise: float = SMALLEST_RATIO
) -> Comparison:
    """Compare two contenders that took turns, repeat by repeat.

    The ratio differs from 1 if the interval of its median leaves 1 out and it is larger than the
    noise.

    Args:
        noise: largest ratio without a meaning, for example that of the same code with itself; at
            least SMALLEST_RATIO.
    """
    ratios = paired_ratios(base, other)
    low, high = spread(ratios)
    middle, interval = median(ratios), median_interval(ratios)
    certain = interval is not None and not interval[0] <= 1.0 <= interval[1]
    differs = certain and max(middle, 1 / middle) > max(noise, SMALLEST_RATIO)
    return Comparison(middle, low, high, interval, differs)


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
    """A figure of interest.

    Attributes:
        number: median.
        low: lower quartile.
        high: upper quartile.
        unit: "us", "ms", "s", "MB", "x", "%" or "" for a loss.
        met: whether the target is met; None without a target.
    """

    label: str
    number: float
    low: float
    high: float
    unit: str
    verdict: str = ""
    met: bool | None = None


def figure_of(
    label: str, values: Sequence[float], unit: str, target: float | None = None
) -> Figure:
    """Return the figure of repeated measurements.

    Args:
        target: the median must be less; None without a target.
    """
    low, high = spread(values)
    met = None if target is None else median(values) < target
    verdict = "" if target is None else f"target: below {target:g} {unit}"
    return Figure(label, median(values), low, high, unit, verdict, met)
