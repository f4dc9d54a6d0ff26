"""The flat piece of memory that every engine moves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hvdtrain.types import DType

__all__ = ["Buffer"]

_FRACTIONAL = frozenset({DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128})


# Not frozen, which would triple the time to make one.
@dataclass(slots=True)
class Buffer:
    """`count` contiguous elements of `dtype` that start at address `pointer` on `device`.

    `owner` is whatever keeps the memory alive; the buffer holds it as long as it lives.
    """

    pointer: int
    dtype: DType
    count: int
    device: str = "cpu"
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def from_array(cls, array: npt.NDArray[np.generic], dtype: DType | None = None) -> Buffer:
        """View a C-contiguous array; `dtype` names the type where numpy has none (bfloat16)."""
        if not array.flags.c_contiguous:
            raise ValueError(f"a Buffer needs C-contiguous memory, got strides {array.strides}")
        return cls(array.ctypes.data, dtype or DType(array.dtype.name), array.size, owner=array)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def array(self) -> npt.NDArray[np.generic]:
        """Return the elements as a writable 1-d numpy view (CPU only; bfloat16 as uint16)."""
        if self.device != "cpu":
            raise ValueError(f"numpy cannot see memory on {self.device}")
        if self.count == 0:
            return np.empty(0, self.dtype.numpy)
        memory = (ctypes.c_byte * self.nbytes).from_address(self.pointer)
        memory.owner = self.owner  # type: ignore[attr-defined]  # lives as long as the array
        return np.frombuffer(memoryview(memory), self.dtype.numpy)

    def scale(self, factor: float) -> None:
        """Multiply every element by `factor` in place; the factor 1 leaves the memory untouched.

        Integers are multiplied in float64 and truncated.

        Raises:
            ValueError: the element type is a half type or bool.
        """
        if factor == 1.0:
            return
        array = self.array()
        if self.dtype in _FRACTIONAL:
            with np.errstate(all="ignore"):  # loss scalers look for what overflows
                np.multiply(array, factor, out=array)
        elif self.dtype.is_integer:
            array[:] = np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
        else:
            raise ValueError(f"a factor of {factor} cannot be applied to {self.dtype.value}")

    def slice(self, start: int, count: int) -> Buffer:
        """View `count` elements from element `start` on."""
        if start < 0 or count < 0 or start + count > self.count:
            raise ValueError(f"slice {start}+{count} lies outside a buffer of {self.count}")
        address = self.pointer + start * self.dtype.itemsize
        return Buffer(address, self.dtype, count, self.device, self)

    def pieces(self, nbytes: int) -> Iterator[Buffer]:
        """Cut it into views of at most `nbytes` (but at least one element); none of nothing."""
        if self.nbytes <= nbytes:
            if self.count:
                yield self
            return
        count = max(1, nbytes // self.dtype.itemsize)
        for start in range(0, self.count, count):
            yield self.slice(start, min(count, self.count - start))
