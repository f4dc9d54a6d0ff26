"""Counts of the gradients that servers have received."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pushes:
    """Gradients that servers have received."""

    staleness: Counter[int] = field(default_factory=Counter)
    dropped: int = 0

    def apply(self, staleness: int) -> None:
        """Count a gradient that is applied."""
        self.staleness[staleness] += 1

    def drop(self, samples: int) -> None:
        """Count a gradient that is dropped."""
        self.dropped += samples > 0

    def add(self, other: Pushes) -> None:
        """Add the counts of others."""
        self.staleness += other.staleness
        self.dropped += other.dropped

    def record(self) -> dict[str, Any]:
        """Return the counts for summary.json."""
        return {
            "applied": self.applied,
            "dropped": self.dropped,
            "mean_staleness": self.mean,
            "staleness": {str(value): self.staleness[value] for value in sorted(self.staleness)},
        }

    @property
    def applied(self) -> int:
        """The number of gradients that were applied."""
        return self.staleness.total()

    @property
    def mean(self) -> float:
        """The mean staleness of the applied gradients; 0 if there are none."""
        return sum(value * count for value, count in self.staleness.items()) / max(self.applied, 1)
