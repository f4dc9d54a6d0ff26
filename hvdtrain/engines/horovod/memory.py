"""Buffers as torch tensors over the same memory, for the horovod engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType

__all__ = ["elements", "even_rows", "pieces", "starts", "word_counts", "words"]

# Moving needs the width of an element, not its meaning.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements(buffer: Buffer) -> torch.Tensor:
    """View the elements as a 1-d tensor of their type."""
    return _view(buffer, getattr(torch, buffer.dtype.value))


def words(buffer: Buffer) -> torch.Tensor:
    """View the memory as a 1-d tensor of integers, which Horovod moves whatever they mean."""
    return _view(buffer, _WORDS[_width(buffer.dtype)])


def word_counts(dtype: DType, counts: Sequence[int]) -> list[int]:
    """Return how many of `words` so many elements are."""
    factor = dtype.itemsize // _width(dtype)
    return [count * factor for count in counts]


def pieces(buffer: Buffer, nbytes: int) -> Iterator[Buffer]:
    """Cut a buffer into parts of at most `nbytes`; an empty one has none."""
    count = max(1, nbytes // buffer.dtype.itemsize)
    for start in range(0, buffer.count, count):
        yield buffer.slice(start, min(count, buffer.count - start))


def starts(counts: Sequence[int]) -> list[int]:
    """Return where each part begins."""
    return [0, *accumulate(counts)][:-1]


def even_rows(counts: Sequence[int]) -> int:
    """Return how many rows Horovod's reducescatter deals out to give these counts, or 0.

    It deals rows as evenly as possible, and the first ranks get the larger parts.
    """
    row = gcd(*counts)
    if row == 0:
        return 0
    rows, size = sum(counts) // row, len(counts)
    dealt = [rows // size + (rank < rows % size) for rank in range(size)]
    return rows if [part * row for part in dealt] == list(counts) else 0


def _view(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer.array(), dtype=dtype)


def _width(dtype: DType) -> int:
    return min(dtype.itemsize, max(_WORDS))
