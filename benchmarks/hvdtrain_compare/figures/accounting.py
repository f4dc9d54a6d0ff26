"""Which samples a contender has really seen: duplicates and losses, from their numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.data.sampling import Indices
from hvdtrain_compare.protocol.rank_file import Weights


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
    """Count the samples of one pass.

    Args:
        parts: numbers of the samples of each process, int64 [n].
    """
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
