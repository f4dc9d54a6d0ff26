"""Orthonormal rows, with the same steps on numpy arrays and torch tensors."""

from __future__ import annotations

from typing import Any, cast

from hvdtrain.arrays import Array, copy, namespace

# Added to divisors, so that zeros stay zeros; too small to change others in float32.
_EPSILON = 1e-30


def orthonormal(rows: Array) -> Array:
    """Return rows that span the same space, orthogonal to each other and of norm 1.

    Modified Gram-Schmidt, twice: in the first pass rows that depend on others become rounding
    errors, which the second pass makes orthogonal. Zeros stay zeros.

    Args:
        rows: [count, length], float32 or float64.
    """
    made: Any = copy(rows)
    xp = namespace(rows)
    made /= abs(made).max() + _EPSILON  # squares of small numbers would become zero
    for _ in range(2):
        for number in range(made.shape[0]):
            row, after = made[number], made[number + 1 :]
            row /= xp.sqrt((row * row).sum()) + _EPSILON
            after -= (after * row).sum(1)[:, None] * row
    return cast("Array", made)
