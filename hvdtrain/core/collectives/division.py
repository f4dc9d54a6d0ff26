"""Division of integers, for averages."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType

_HIGHEST = (1 << 63) - 1


def divide_truncating(buffer: Buffer, divisor: int) -> None:
    """Divide integers in place, truncating towards zero."""
    if buffer.device == "cpu":
        _divide_array(cast("npt.NDArray[np.integer[Any]]", buffer.array()), divisor)
    elif buffer.dtype is DType.UINT64:
        _divide_bits(buffer.view(DType.INT64).elements(), divisor)
    else:
        # As int64, because torch does not divide all integer types.
        tensor: Any = buffer.elements()
        tensor.copy_(tensor.long().div_(divisor, rounding_mode="trunc"))


def _divide_array(array: npt.NDArray[np.integer[Any]], divisor: int) -> None:
    rounded_up = (array < 0) & (array % divisor != 0)  # // rounds down
    array //= divisor
    array[rounded_up] += 1


def _divide_bits(bits: Any, divisor: int) -> None:
    """Divide an int64 torch tensor with the bits of uint64, which torch does not divide."""
    quotient = ((bits >> 1) & _HIGHEST).div_(divisor, rounding_mode="trunc") << 1
    rest = bits - quotient * divisor
    bits.copy_(quotient + (rest >= divisor))
