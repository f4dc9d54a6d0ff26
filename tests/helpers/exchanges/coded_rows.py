"""Rows that are hard to code, and what the kernel and operations on arrays make of them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.arrays import Array, like_shape, to_host
from hvdtrain.core.exchanges.codes import row_bytes

# A row less than numpy adds side by side, rows divided into halves, whole and odd ones.
LENGTHS = (7, 8, 65, 129, 512, 1001, 20_011)


def normal(rows: int, length: int, kind: type[np.floating]) -> Any:
    return np.random.default_rng(rows).standard_normal((rows, length)).astype(kind)


def room(rows: Array, bits: int) -> tuple[Array, Array]:
    count, length = rows.shape
    return (
        like_shape(rows, (count, 2)),
        like_shape(rows, (count, row_bytes(length, bits)), "uint8"),
    )


def coded(code: Callable[..., object], rows: Array, bits: int) -> list[Any]:
    """Return what a function makes of rows: the error, factors, codes, values, twice of them."""
    factors, packed = room(rows, bits)
    code("encode", rows, factors, packed, bits)
    values = like_shape(rows, rows.shape)
    code("decode", values, factors, packed, bits)
    twice = values * 1
    code("add_decoded", twice, factors, packed, bits)
    return [to_host(each) for each in (rows, factors, packed, values, twice)]


def rows_of_all_kinds(length: int, kind: type[np.floating]) -> Any:
    """Return rows of normal, tiny, huge, equal and few numbers, and zeros of both signs."""
    rows = normal(12, length, kind)
    info = np.finfo(kind)
    rows[1] *= info.smallest_subnormal * 100
    rows[2] *= info.smallest_normal
    rows[3] *= np.sqrt(info.max) / length
    rows[4], rows[5], rows[6] = 0, 1, -3
    rows[7, ::2] = 0
    rows[8] = np.copysign(0.5, rows[8])
    rows[9] = np.round(rows[9] * 4) / 8
    rows[10] = np.abs(rows[10])
    rows[11, 1:] = -0.0
    return rows
