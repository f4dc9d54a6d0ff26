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

# TensorFlow takes an array for a tensor without a copy where its memory begins at a multiple.
ALIGNMENT_BYTES = 64

_WIRE_TYPES = {"float16": np.float32, "bfloat16": np.float32, "bool": np.uint8}


def as_buffer(array: Array) -> Buffer:
    """View a contiguous array; the buffer keeps its memory alive.

    Raises:
        TypeError: its element type has no counterpart here (strings, for example).
    """
    try:
        dtype = DType(array.dtype.name)
    except ValueError:
        raise TypeError(f"tensors of {array.dtype.name} cannot be communicated") from None
    return Buffer.from_array(array, dtype)


def from_buffer(buffer: Buffer, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Return the elements of a buffer in host memory as an array over the same memory."""
    return buffer.array().view(dtype).reshape(shape)


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return uninitialised memory that becomes a tensor without a copy."""
    element = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes].view(element).reshape(shape)


def wire_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which tensors are reduced: half types in float32, bool in uint8."""
    return np.dtype(_WIRE_TYPES.get(dtype.name, dtype))


class LentMemory:
    """Blocks of memory of one size, the first of which is the best; any thread may borrow one.

    Args:
        first: bytes; further blocks are made when it is still lent.
    """

    def __init__(self, first: Array) -> None:
        self._lock = threading.Lock()
        self._blocks = [first]
        self._loans: list[weakref.ref[object] | None] = [None]

    def lend(self) -> Array:
        """Return a block that no tensor lies in; it counts as lent while arrays show it."""
        with self._lock:
            number = self._free()
            block = self._blocks[number]
            memory = (ctypes.c_byte * block.size).from_address(block.ctypes.data)
            memory.owner = block  # type: ignore[attr-defined]  # lives as long as the loan
            self._loans[number] = weakref.ref(memory)
        return np.frombuffer(memoryview(memory), np.uint8)

    def _free(self) -> int:
        """Return the number of a block that is not lent, while the lock is held."""
        for number, loan in enumerate(self._loans):
            if loan is None or loan() is None:
                return number
        self._blocks.append(empty(self._blocks[0].shape, np.uint8))
        self._loans.append(None)
        return len(self._blocks) - 1
