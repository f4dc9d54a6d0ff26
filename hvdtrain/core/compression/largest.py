"""The indices of the largest elements, the same ones wherever the elements are the same."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from hvdtrain.arrays import Array, is_tensor, namespace

# Elements of which a sample finds the threshold of candidates.
_SAMPLED = 1 << 14


def largest(elements: Array, count: int) -> Array:
    """Return the indices of the elements of largest magnitude, the largest first.

    Of equal magnitudes the one with the lower index comes first; NaN counts as infinite.

    Returns:
        [count] int64.
    """
    xp, magnitude = namespace(elements), cast("Any", abs(elements))
    chosen = _candidates(magnitude, count)
    values = magnitude[chosen]
    values = xp.where(xp.isnan(values), float("inf"), values)
    return cast("Array", chosen[_stable_order(-values)[:count]])


def _candidates(magnitude: Any, count: int) -> Any:
    """Return the indices, in order, of at least `count` elements that contain the largest ones."""
    sample = magnitude[:: max(1, magnitude.shape[0] // _SAMPLED) | 1]
    # Twice as many as are needed, so that there are hardly ever too few.
    position = 2 * count * sample.shape[0] // magnitude.shape[0] + 16
    if position < sample.shape[0]:
        threshold = _sorted(sample)[-position]
        found = _nonzero(~(magnitude < threshold))
        if found.shape[0] >= count:
            return found
    return _nonzero(namespace(magnitude).ones_like(magnitude))


def _sorted(values: Any) -> Any:
    return values.sort().values if is_tensor(values) else np.sort(values)


def _nonzero(flags: Any) -> Any:
    return flags.nonzero()[:, 0] if is_tensor(flags) else np.flatnonzero(flags)


def _stable_order(values: Any) -> Any:
    return values.argsort(stable=True) if is_tensor(values) else values.argsort(kind="stable")
