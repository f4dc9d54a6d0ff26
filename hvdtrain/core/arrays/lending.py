"""Memory that is lent as tensors, and used again when nothing shows it any more."""

from __future__ import annotations

import ctypes
import threading
import weakref

import numpy as np

from hvdtrain.core.arrays.memory import Array, empty

__all__ = ["LentMemory"]


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
