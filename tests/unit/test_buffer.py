"""Buffers over numpy memory, and the arithmetic on them."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.buffer import Buffer
from hvdtrain.core.collectives.adasum import combine
from hvdtrain.core.collectives.allreduce import divide_truncating
from hvdtrain.core.collectives.reducescatter import rows_of_rank
from hvdtrain.types import DType


def test_views_share_memory() -> None:
    array = np.arange(10, dtype=np.int32)
    part = Buffer.from_array(array).slice(2, 3)
    part.array()[:] = -1
    assert array.tolist() == [0, 1, -1, -1, -1, 5, 6, 7, 8, 9]
    assert (part.count, part.nbytes, part.dtype) == (3, 12, DType.INT32)
    assert Buffer.from_array(array[:0]).array().size == 0
    with pytest.raises(ValueError, match="outside a buffer of 3"):
        part.slice(1, 3)
    with pytest.raises(ValueError, match="C-contiguous"):
        Buffer.from_array(array[::2])


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8"])
def test_division_truncates_towards_zero(dtype: str) -> None:
    low = np.iinfo(dtype).min
    values = [low, low + 1, 0, 1, 5, np.iinfo(dtype).max] + ([-1, -5] if low else [])
    array = np.array(values, dtype)
    divide_truncating(Buffer.from_array(array), 3)
    assert array.tolist() == [int(abs(v) // 3 * (1 if v > 0 else -1)) for v in map(int, values)]


def test_scale() -> None:
    floats, integers = np.array([1.0, 3.0]), np.array([3, -3])
    Buffer.from_array(floats).scale(0.5)
    Buffer.from_array(integers).scale(0.5)
    assert floats.tolist() == [0.5, 1.5]
    assert integers.tolist() == [1, -1]
    with pytest.raises(ValueError, match="cannot be applied to bool"):
        Buffer.from_array(np.array([True])).scale(0.5)


def test_adasum_of_two() -> None:
    a, b = np.array([1.0, 0.0]), np.array([0.0, 2.0])
    assert combine(a, b).tolist() == [1.0, 2.0]
    assert combine(a, a).tolist() == [1.0, 0.0]
    assert combine(0 * a, b).tolist() == [0.0, 2.0]
    assert np.allclose(combine(3 * a + b, a), 3 * combine(a + b / 3, a / 3))


@pytest.mark.parametrize("rows", range(8))
@pytest.mark.parametrize("size", range(1, 5))
def test_rows_are_as_even_as_can_be(rows: int, size: int) -> None:
    parts = [rows_of_rank(rows, rank, size) for rank in range(size)]
    assert sum(parts) == rows
    assert parts == sorted(parts, reverse=True)
    assert max(parts) - min(parts) <= 1
