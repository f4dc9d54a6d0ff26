"""Quantities with a spread: an interval instead of a number. Pure.

A quantity with a spread is a sequence of values that are equally likely, as its repeated
measurements are; one that is given is a sequence of one value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median, quantiles
from typing import TypeVar

T = TypeVar("T")

# The share of the values that an interval contains: all but the lowest and the highest 5 %.
COVERAGE = 0.9
_PARTS = round(2 / (1 - COVERAGE))
DRAWS = 200


@dataclass(frozen=True)
class Interval:
    """The interval that contains a value with the probability COVERAGE."""

    low: float
    middle: float
    high: float

    def contains(self, value: float) -> bool:
        """Return whether a value lies in it."""
        return self.low <= value <= self.high


def interval_of(values: Sequence[float]) -> Interval:
    """Return the interval of values that are equally likely."""
    if len(set(values)) == 1:
        return Interval(values[0], values[0], values[0])
    cuts = quantiles(values, n=_PARTS, method="inclusive")
    return Interval(cuts[0], median(values), cuts[-1])


def drawn(values: Sequence[T], seed: int) -> Sequence[T]:
    """Return DRAWS values at random, the same in each call; a given value as it is.

    Quantities that are drawn with different seeds vary independently of one another.
    """
    return values if len(values) == 1 else Random(seed).choices(values, k=DRAWS)
