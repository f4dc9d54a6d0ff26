"""What follows from measurements: counts, times, and how they are written. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, median, quantiles, stdev

import numpy as np

from hvdtrain.data.sampling import Indices
from hvdtrain_compare.protocol import Weights


@dataclass(frozen=True)
class SampleCount:
    """The samples of one pass over a data set."""

    samples: int
    seen: int
    duplicates: int
    lost: int

    @property
    def exact(self) -> bool:
        """Whether each sample was used once."""
        return self.duplicates == 0 and self.lost == 0

    @property
    def text(self) -> str:
        """The counts for people."""
        parts = [f"{self.seen}"]
        if self.duplicates:
            parts.append(f"{self.duplicates} twice")
        if self.lost:
            parts.append(f"{self.lost} never")
        return ", ".join(parts)


def count_samples(parts: Sequence[Indices], samples: int) -> SampleCount:
    """Count the samples of one pass."""
    used = np.concatenate([np.zeros(0, np.int64), *parts])
    if len(used) and not 0 <= used.min() <= used.max() < samples:
        raise ValueError(f"samples are numbered from 0 to {samples - 1}, got {used.max()}")
    times = np.bincount(used, minlength=samples)
    return SampleCount(
        samples, len(used), int((times - 1).clip(min=0).sum()), int((times == 0).sum())
    )


def worst(counts: Sequence[SampleCount]) -> SampleCount:
    """Return the pass with the most duplicates and losses."""
    return max(counts, key=lambda count: (count.duplicates + count.lost, count.seen))


def largest_difference(one: Weights, other: Weights) -> float:
    """Return max |a - b| over all weights of two models; NaN where one is not finite."""
    shapes = {name: weights.shape for name, weights in one.items()}
    others = {name: weights.shape for name, weights in other.items()}
    if shapes != others:
        odd = sorted({*shapes.items()} ^ {*others.items()})
        raise ValueError(f"the models differ in {odd[0][0]}")
    found = [np.abs(weights - other[name]).max(initial=0.0) for name, weights in one.items()]
    return float(np.max(found)) if found else 0.0


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
    """Summarize the steps of all repeats."""
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


_UNKNOWN = "-"
_UNITS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))


def time_text(seconds: float | None) -> str:
    """Return a time with its unit: "812 us", "3.41 ms", "2.5 s"."""
    if seconds is None:
        return _UNKNOWN
    unit, size = next(one for one in _UNITS if seconds < one[1] * 1000 or one is _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def interval_text(low: float, high: float) -> str:
    """Return an interval of times in one unit: "3.1 to 3.52 ms"."""
    unit, size = next(one for one in _UNITS if high < one[1] * 1000 or one is _UNITS[-1])
    return f"{low / size:.3g} to {high / size:.3g} {unit}"


def bytes_text(nbytes: float | None) -> str:
    """Return a number of bytes with its unit, in powers of 1000."""
    if nbytes is None:
        return _UNKNOWN
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def ratio_text(ratio: Ratio) -> str:
    """Return a ratio, with the smallest and the largest of the repeats if there are several."""
    if ratio.low == ratio.high:
        return f"{ratio.middle:.2f}"
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def noise_text(ratio: Ratio, noise: float) -> str:
    """Return what the ratio of the same code to itself says of the others."""
    return (
        f"the same code took {ratio.low:.2f} to {ratio.high:.2f} of its own time: ratios of "
        f"{1 / noise:.2f} to {noise:.2f} are noise"
    )


def difference_text(difference: float | None) -> str:
    """Return a difference of weights; 0 where all are bitwise equal."""
    if difference is None:
        return _UNKNOWN
    return "0" if difference == 0 else f"{difference:.1e}"


def score_text(name: str, value: float) -> str:
    """Return a score; a metric is a share, the loss is not."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if name == "loss" else f"{100 * value:.2f} %"
