"""Factors of a reduction, applied to a buffer in place."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType

__all__ = ["scale"]

_FRACTIONAL = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128})


def scale(buffer: Buffer, factor: float) -> None:
    """Multiply every element by `factor`; the factor 1 leaves the memory untouched.

    Integers are multiplied in float64 and truncated.

    Raises:
        ValueError: the element type is a half type or bool.
    """
    if factor == 1.0:
        return
    array = buffer.array()
    if buffer.dtype in _FRACTIONAL:
        np.multiply(array, factor, out=array)
    elif buffer.dtype.is_integer:
        array[:] = np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    else:
        raise ValueError(f"a factor of {factor} cannot be applied to {buffer.dtype.value}")
