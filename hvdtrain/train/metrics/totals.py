"""Sums over samples and ranks, and the means and metrics computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.errors import UsageError

Counts = npt.NDArray[np.float64]
# A number or, for a confusion matrix for example, a nested list of numbers.
MetricValue: TypeAlias = "float | Sequence[MetricValue]"
# The loss and the metrics by name.
Values = dict[str, MetricValue]


class RatedMetric(Protocol):
    """A metric whose values can be compared."""

    @property
    def higher_is_better(self) -> bool | None:
        """Whether higher values are better; None if the value does not rank models."""


class SummedMetric(RatedMetric, Protocol):
    """A metric computed from sums over samples and ranks."""

    def value(self, counts: Counts) -> MetricValue:
        """Return the value for the sums.

        Args:
            counts: float64 sums over all samples, [n].
        """


@dataclass(frozen=True)
class Totals:
    """Sums over samples of all ranks."""

    samples: int = 0
    loss: float = 0.0
    counts: Mapping[str, Counts] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        counts = dict(self.counts)
        for name, added in other.counts.items():
            counts[name] = counts[name] + added if name in counts else added
        return Totals(self.samples + other.samples, self.loss + other.loss, counts)

    def values(self, metrics: Mapping[str, SummedMetric]) -> Values:
        """Return the mean loss, and the metrics that have counts."""
        values: Values = {"loss": self.loss / self.samples}
        for name, counts in self.counts.items():
            values[name] = metrics[name].value(np.asarray(counts))
        return values


def improved(
    value: float, best: float | None, name: str, metrics: Mapping[str, RatedMetric]
) -> bool:
    """Return whether a value is better than the best one before it.

    Lower is better for the loss, and for metrics whose higher_is_better is False. A value that is
    not finite is never better.
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value > best if _higher_is_better(name, metrics) else value < best


def require_known(name: str, metrics: Mapping[str, RatedMetric]) -> None:
    """Check, before the first evaluation, that it will have the value that decides."""
    known = [one for one in ("loss", *metrics) if _higher_is_better(one, metrics) is not None]
    if name not in known:
        raise _unknown(name, known)


def require_number(values: Values, name: str, metrics: Mapping[str, RatedMetric]) -> float:
    """Return the value that decides which evaluation is best."""
    numbers = {
        known: float(value)
        for known, value in values.items()
        if isinstance(value, (int, float)) and _higher_is_better(known, metrics) is not None
    }
    if name not in numbers:
        raise _unknown(name, list(numbers))
    return numbers[name]


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    return UsageError(
        f"--best {name}: an evaluation has nothing of that name which can be better or worse: "
        f"choose from {', '.join(known)}"
    )


def _higher_is_better(name: str, metrics: Mapping[str, RatedMetric]) -> bool | None:
    return False if name == "loss" else metrics[name].higher_is_better
