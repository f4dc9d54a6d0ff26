"""Reduction operations and element types, by the names that every layer uses."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import numpy as np

__all__ = ["DType", "ReduceOp"]


class ReduceOp(Enum):
    """How elements of several ranks become one."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    # Enum's own hashes the name in Python, each time; members are singletons.
    __hash__ = object.__hash__


class DType(Enum):
    """Element types; the value is the name that numpy and the frameworks share."""

    BOOL = "bool"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    __hash__ = object.__hash__  # as above

    @cached_property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type of the same width; bfloat16 shows as its uint16 bit pattern."""
        return np.dtype("uint16" if self is DType.BFLOAT16 else self.value)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @cached_property
    def is_integer(self) -> bool:
        """Whether this is a whole-number type (bool is not)."""
        return self.value.startswith(("int", "uint"))

    @cached_property
    def is_half(self) -> bool:
        """Whether this is a type of 16 bits with a fraction."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @cached_property
    def is_complex(self) -> bool:
        """Whether this is a complex type."""
        return self.value.startswith("complex")
