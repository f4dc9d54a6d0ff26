"""Buffers as torch tensors over the same memory, for the horovod engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType

# Integer types of each element width, for moving data of any type.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements(buffer: Buffer) -> torch.Tensor:
    """View the elements as a 1-d tensor of their dtype."""
    return _view(buffer, getattr(torch, buffer.dtype.value))


def words(buffer: Buffer) -> torch.Tensor:
    """View the memory as a 1-d integer tensor of the elements' width, at most 8 bytes."""
    return _view(buffer, _WORDS[_width(buffer.dtype)])


def word_counts(dtype: DType, counts: Sequence[int]) -> list[int]:
    """Return the numbers of words that numbers of elements correspond to."""
    factor = dtype.itemsize // _width(dtype)
    return [count * factor for count in counts]


def starts(counts: Sequence[int]) -> list[int]:
    """Return the offset of each part."""
    return [0, *accumulate(counts)][:-1]


def even_rows(counts: Sequence[int]) -> int:
    """Return the number of rows with which Horovod's reducescatter yields these counts, or 0.

    It distributes rows as evenly as possible, and the first ranks get the larger parts.
    """
    row = gcd(*counts)
    if row == 0:
        return 0
    rows, size = sum(counts) // row, len(counts)
    distributed = [rows // size + (rank < rows % size) for rank in range(size)]
    return rows if [part * row for part in distributed] == list(counts) else 0


def _view(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer.array(), dtype=dtype)


def _width(dtype: DType) -> int:
    return min(dtype.itemsize, max(_WORDS))
