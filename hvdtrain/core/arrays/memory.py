"""numpy arrays as buffers, and memory that becomes a tensor without a copy."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType

__all__ = [
    "ALIGNMENT_BYTES",
    "Array",
    "LentMemory",
    "as_buffer",
    "empty",
    "from_buffer",
    "wire_type",
]

Array = npt.NDArray[Any]

# TensorFlow converts an array to a tensor without a copy if its address is a multiple of this.
ALIGNMENT_BYTES = 64

_WIRE_TYPES = {"float16": np.float32, "bfloat16": np.float32, "bool": np.uint8}


def as_buffer(array: Array) -> Buffer:
    """Return a buffer over the memory of a contiguous array, which it keeps alive.

    Raises:
        TypeError: the element type is not supported, e.g. strings.
    """
    try:
        dtype = DType(array.dtype.name)
    except ValueError:
        raise TypeError(f"tensors of {array.dtype.name} cannot be communicated") from None
    return Buffer.from_array(array, dtype)


def from_buffer(buffer: Buffer, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return an array over the memory of a buffer on the host.

    Args:
        buffer: elements in host memory.
        dtype: element type of the array.
        shape: shape of the array.
    """
    return buffer.array().view(dtype).reshape(shape)


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an uninitialized array that becomes a tensor of TensorFlow without a copy.

    Args:
        shape: shape of the array.
        dtype: element type of the array.
    """
    element = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes].view(element).reshape(shape)


def wire_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which tensors are reduced: float32 for half types, uint8 for bool."""
    return np.dtype(_WIRE_TYPES.get(dtype.name, dtype))


class LentMemory:
    """Blocks of memory of one size, for use by any thread; the first one is preferred.

    Args:
        first: uint8 array; further blocks are allocated while it is in use.
    """

    def __init__(self, first: Array) -> None:
        self._lock = threading.Lock()
        self._blocks = [first]
        self._loans: list[weakref.ref[object] | None] = [None]

    def lend(self) -> Array:
        """Return an unused block, which counts as used as long as arrays refer to it."""
        with self._lock:
            number = self._free()
            block = self._blocks[number]
            memory = (ctypes.c_byte * block.size).from_address(block.ctypes.data)
            memory.owner = block  # type: ignore[attr-defined]  # lives as long as the loan
            self._loans[number] = weakref.ref(memory)
        return np.frombuffer(memoryview(memory), np.uint8)

    def _free(self) -> int:
        """Return the number of an unused block; the lock must be held."""
        for number, loan in enumerate(self._loans):
            if loan is None or loan() is None:
                return number
        self._blocks.append(empty(self._blocks[0].shape, np.uint8))
        self._loans.append(None)
        return len(self._blocks) - 1
