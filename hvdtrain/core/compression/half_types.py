"""Rounding to half types, for numpy arrays and torch tensors."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from hvdtrain.arrays import Array, HostArray, is_tensor, namespace
from hvdtrain.types import DType


def to_float32(array: Array) -> Array:
    """Return an array converted to float32, or itself if it is float32."""
    given: Any = array
    return cast("Array", given.float() if is_tensor(array) else given.astype("f4", copy=False))


def round_to_half(array: Array, half: DType) -> Array:
    """Return elements rounded to a half type, to the nearest, ties to even."""
    if is_tensor(array):
        given: Any = array
        return cast("Array", given.to(getattr(namespace(array), half.value)))
    values = cast("HostArray", array)
    rounded = _bfloat16_bits(values) if half is DType.BFLOAT16 else values.astype(np.float16)
    return cast("Array", rounded)


def widen_half(array: Array, half: DType) -> Array:
    """Return the float32 values of an array that round_to_half() has returned."""
    if is_tensor(array) or half is DType.FLOAT16:
        return to_float32(array)
    bits = cast("HostArray", array).astype(np.uint32)
    bits <<= 16
    return cast("Array", bits.view(np.float32))


def _bfloat16_bits(values: HostArray) -> HostArray:
    """Return the upper halves of float32 values, after adding what rounds to nearest even."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    rounded[np.isnan(values)] = 0x7FC0  # the addition may have made infinity or zero of it
    return rounded.astype(np.uint16)
