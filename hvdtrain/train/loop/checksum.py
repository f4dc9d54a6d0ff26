"""Checksums of tensors that depend on the position of each element. Pure functions.

The bytes of a tensor are words x_0, x_1 ... of 64 bits, cut into rows of ROW_WORDS. With fixed odd
numbers m_0, m_1 ..., modulo 2^64,

    sum_i((x_i xor (x_i >> 29)) * m_i)

is the checksum of a row; the checksum of several rows is the checksum of their checksums. A product
modulo 2^64 carries differences upwards only, so that two differences in the highest bits, such as
the signs of floats, would often cancel: the shift moves them down. A change of one word is always
detected, unless all its bits change; other changes are missed about once in 2^32 or less often.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]

# A row, its products and the multipliers together fit into a second-level cache.
ROW_WORDS = 1 << 15
SHIFT = 29


@cache
def multipliers() -> Words:
    """Return the multipliers m, int64 [ROW_WORDS]: the first results of splitmix64, made odd."""
    state = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: Words = ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    return numbers


def array_checksum(array: npt.NDArray[Any]) -> int:
    """Return the checksum of an array's bytes, between -2^63 and 2^63 - 1."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = np.zeros(-(-data.size // 8), np.int64)
    whole.view(np.uint8)[: data.size] = data
    return _checksum(whole)


def number_checksum(number: float) -> int:
    """Return the checksum of a number."""
    return array_checksum(np.array(number))


def _checksum(words: Words) -> int:
    rows = [words[start : start + ROW_WORDS] for start in range(0, words.size, ROW_WORDS)]
    sums = [_row_sum(row) for row in rows]
    if len(sums) > 1:
        return _checksum(np.array(sums, np.int64))
    return sums[0] if sums else 0


def _row_sum(row: Words) -> int:
    return int(((row ^ (row >> SHIFT)) * multipliers()[: row.size]).sum())
