"""Memory that is lent to TensorFlow as tensors, and used again when it has let go of them."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from hvdtrain.tensors.tensorflow import Array, empty

__all__ = ["LentMemory"]


class LentMemory:
    """Blocks of memory of one size, the first of which is the best.

    Args:
        first: bytes; further blocks are made when it is still lent.
    """

    def __init__(self, first: Array) -> None:
        self._blocks = [first]
        self._loans: list[weakref.ref[object] | None] = [None]

    def lend(self) -> Array:
        """Return a block that no tensor lies in; it counts as lent while arrays show it."""
        number = next((i for i, loan in enumerate(self._loans) if loan is None or not loan()), None)
        if number is None:
            number = len(self._blocks)
            self._blocks.append(empty(self._blocks[0].shape, np.uint8))
            self._loans.append(None)
        block = self._blocks[number]
        memory = (ctypes.c_byte * block.size).from_address(block.ctypes.data)
        memory.owner = block  # type: ignore[attr-defined]  # lives as long as the loan
        self._loans[number] = weakref.ref(memory)
        return np.frombuffer(memoryview(memory), np.uint8)
