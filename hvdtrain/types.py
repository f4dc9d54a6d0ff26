"""Reduction operations and element types."""

from __future__ import annotations

from enum import Enum
from functools import cached_property

import numpy as np


class ReduceOp(Enum):
    """Reduction operations."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    # Enum.__hash__ hashes the name in Python on every call; members are singletons.
    __hash__ = object.__hash__


class DType(Enum):
    """Element types; the value is the name in numpy and the frameworks."""

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
        """The numpy dtype of the same width; uint16 for bfloat16."""
        return np.dtype("uint16" if self is DType.BFLOAT16 else self.value)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.numpy.itemsize

    @cached_property
    def is_integer(self) -> bool:
        """Whether this is an integer type (bool is not)."""
        return self.value.startswith(("int", "uint"))

    @cached_property
    def is_half(self) -> bool:
        """Whether this is a 16-bit floating-point type."""
        return self in (DType.FLOAT16, DType.BFLOAT16)

    @cached_property
    def is_complex(self) -> bool:
        """Whether this is a complex type."""
        return self.value.startswith("complex")
