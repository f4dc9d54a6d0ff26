"""Whether ranks that average gradients have equal weights, which they compare now and then."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.topology import format_ranks

# Compared of each parameter: weights that differ do so nearly everywhere.
MOST_ELEMENTS = 1 << 14
_PERIOD = 1000
# Relative to the norm: processors of several kinds may round each step differently.
_TOLERANCE, _TOLERANCE_OF_HALF_TYPES = 1e-3, 0.1
# Radians of a difference that is just allowed. No fraction of the circle: weights that people set
# differ by round numbers, which must not be whole turns.
_ANGLE = 6.17e-3


def is_due(steps: int) -> bool:
    """Return whether weights are compared after so many steps: 1, 2, 4, 8 ... and each thousand."""
    # Not before the first one: programs may broadcast weights after it, as TensorFlow's do.
    return steps > 0 and (steps & (steps - 1) == 0 or steps % _PERIOD == 0)


@dataclass(frozen=True)
class WeightSums:
    """The sum of the elements of each parameter of a rank, and by how much it may differ."""

    names: Sequence[str]
    sums: Sequence[float]
    allowed: Sequence[float]

    @property
    def direction(self) -> tuple[float, float]:
        """A point on the unit circle, the same on ranks with equal weights."""
        pairs = zip(self.sums, self.allowed, strict=True)
        scaled = [(x, round(math.log2(most))) for x, most in pairs if most and math.isfinite(most)]
        # In units of powers of two, which seldom differ where weights differ by rounding. The power
        # itself tells weights from their double.
        total = sum(x / 2.0**power + 77 * power for x, power in scaled)
        return math.cos(_ANGLE * total), math.sin(_ANGLE * total)

    def differing(self, other: WeightSums) -> list[str]:
        """Return the names of the parameters that differ from another rank's."""
        rows = zip(self.names, self.sums, other.sums, self.allowed, strict=True)
        return [name for name, own, theirs, most in rows if abs(own - theirs) > most]


def sum_weights(rows: Iterable[tuple[str, HostArray, int]]) -> WeightSums:
    """Return the sums of parameters: names, first elements, and bytes of an element."""
    names, sums, allowed = [], [], []
    for name, elements, itemsize in rows:
        values = elements.astype(np.float64)
        names.append(name)
        with np.errstate(all="ignore"):  # weights that are not finite are left out
            sums.append(float(values.sum()))
            norm = float(np.linalg.norm(values))
        allowed.append(norm * (_TOLERANCE if itemsize > 2 else _TOLERANCE_OF_HALF_TYPES))
    return WeightSums(names, sums, allowed)


def describe_differences(gathered: Sequence[WeightSums], ranks: Sequence[int]) -> str:
    """Return which weights differ from the first rank's, and where; "" for none or no ranks."""
    found = [each.differing(gathered[0]) for each in gathered]  # of each rank
    names = next(filter(None, found), [])
    if not names:
        return ""
    others = [rank for rank, theirs in zip(ranks, found, strict=True) if theirs]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more} of {format_ranks(others)}, from rank {ranks[0]}'s"


def may_differ(ranks: int, x: float, y: float) -> bool:
    """Return whether some rank's direction is another one, from the sums over ranks."""
    return ranks - math.hypot(x, y) > _ANGLE**2 / 8
