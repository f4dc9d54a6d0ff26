"""Minima and maxima of floating-point and unsigned numbers as those of signed integers.

Libraries compare with <, and then it depends on the rank and on the place in the message whether
NaN stays. Integers of the same order cost one reduction, and lose neither NaN nor the sign of zero.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType, ReduceOp

# The integers of each type, and the bits of infinity.
_INTEGERS = {
    DType.FLOAT32: (DType.INT32, 0x7F8 << 20),
    DType.FLOAT64: (DType.INT64, 0x7FF << 52),
}


def is_ordered(dtype: DType, op: ReduceOp) -> bool:
    """Return whether to_ordered() writes into a buffer of this type."""
    return dtype in _INTEGERS and op in (ReduceOp.MIN, ReduceOp.MAX)


def to_ordered(buffer: Buffer, op: ReduceOp) -> Buffer:
    """Overwrite floats with integers of the same order for MIN or MAX, in which NaN wins."""
    if not is_ordered(buffer.dtype, op):
        return buffer
    integers, infinity = _INTEGERS[buffer.dtype]
    ordered = buffer.view(integers)
    _flip_negative(ordered)
    largest = _largest(integers)
    bits: Any = ordered.elements()
    with _writing(bits):
        bits[(bits > infinity) | (bits < ~infinity)] = largest if op is ReduceOp.MAX else ~largest
    return ordered


def from_ordered(ordered: Buffer, buffer: Buffer) -> None:
    """Turn integers back into the numbers of a buffer over the same memory, if they are."""
    if ordered.dtype is not buffer.dtype:
        _flip_negative(ordered)


def flip_highest(signed: Any, op: ReduceOp) -> None:
    """Convert the order of 64-bit numbers for MIN or MAX: unsigned ones are read as signed."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        signed ^= -(1 << 63)


def _flip_negative(integers: Buffer) -> None:
    """Reverse the order of negative integers: the magnitude of floats follows their sign."""
    bits: Any = integers.elements()
    with _writing(bits):
        flipped = bits >> (8 * integers.dtype.itemsize - 1)
        flipped &= _largest(integers.dtype)
        bits ^= flipped


def _largest(integers: DType) -> int:
    return (1 << (8 * integers.itemsize - 1)) - 1


def _writing(bits: Any) -> Any:
    """Return a context in which inference tensors, too, can be written."""
    return sys.modules["torch"].inference_mode() if hasattr(bits, "data_ptr") else nullcontext()
