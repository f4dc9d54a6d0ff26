"""Factors of a reduction, applied to a buffer in place."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType

__all__ = ["SCALABLE", "scale"]

SCALABLE = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128})


def scale(buffer: Buffer, factor: float) -> None:
    """Multiply every element by `factor`; the factor 1 leaves the memory untouched.

    Raises:
        ValueError: the element type cannot hold a fraction.
    """
    if factor == 1.0:
        return
    if buffer.dtype not in SCALABLE:
        raise ValueError(f"a factor of {factor} needs floating point, got {buffer.dtype.value}")
    array = buffer.array()
    np.multiply(array, factor, out=array)
