"""A figure with its spread and what is to be thought of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hvdtrain_bench.analysis.statistics import spread


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
