"""Sums over samples and ranks, and the means and metrics computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

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
