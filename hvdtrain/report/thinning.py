"""Leaves out points of a long curve so that its picture stays the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BUCKETS", "kept"]

# As many as a wide screen has pixels for a curve.
BUCKETS = 1000


def kept(values: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Return the places of the values that a picture needs, in order.

    These are the first and the last value, and the lowest and the highest of each of `buckets`
    equal stretches, with the first NaN of each. All, where they are no more than that anyway.

    Args:
        values: of one curve, in order.
        buckets: stretches, >= 1.
    """
    count = len(values)
    if count <= 2 * buckets:
        return list(range(count))
    places = {0, count - 1}
    for bucket in range(buckets):
        low, high = bucket * count // buckets, (bucket + 1) * count // buckets
        part = values[low:high]
        # Not so where the sum overflows, too: then it takes longer.
        if math.isfinite(sum(part)):
            places.update((low + part.index(min(part)), low + part.index(max(part))))
        else:
            places.update(low + place for place in _extremes(part))
    return sorted(places)


def _extremes(part: Sequence[float]) -> set[int]:
    """Return the places of the lowest and the highest number, and of the first NaN."""
    finite = [place for place, value in enumerate(part) if math.isfinite(value)]
    first = next(place for place, value in enumerate(part) if not math.isfinite(value))
    if not finite:
        return {first}
    return {first, min(finite, key=part.__getitem__), max(finite, key=part.__getitem__)}
