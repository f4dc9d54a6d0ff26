"""What adds up over samples and ranks, and the means that it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Counts", "Totals", "Values"]

Counts = npt.NDArray[np.float64]
# The loss and the metrics by name; a metric is a number or, as a confusion matrix, a list.
Values = dict[str, Any]


@dataclass(frozen=True)
class Totals:
    """Sums over samples of all ranks.

    Attributes:
        samples: how many they were.
        loss: of their losses.
        counts: for each metric what its counts() gave, added up.
    """

    samples: int = 0
    loss: float = 0.0
    counts: Mapping[str, Counts] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        counts = dict(self.counts)
        for name, added in other.counts.items():
            counts[name] = counts[name] + added if name in counts else added
        return Totals(self.samples + other.samples, self.loss + other.loss, counts)

    def values(self, metrics: Mapping[str, Any]) -> Values:
        """Return the mean loss, and the metrics whose counts are there."""
        values: Values = {"loss": self.loss / self.samples}
        for name, counts in self.counts.items():
            values[name] = metrics[name].value(np.asarray(counts))
        return values
