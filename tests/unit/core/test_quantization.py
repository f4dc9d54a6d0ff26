"""Codes of few bits: known columns, the loss of normal numbers, the kernel, numpy and torch."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from coded_rows import (
    LENGTHS,
    coded_by_arrays,
    coded_by_kernel,
    normal,
    room,
    rows_of_all_kinds,
)
from compression_formulas import coded

from hvdtrain.arrays import Array
from hvdtrain.core.compression import codes
from hvdtrain.core.compression.codes import BITS

TYPES = (np.float32, np.float64)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ([1, 3, -2, -4], [2, 2, -3, -3]),
        ([0, 0, 0, 4], [1, 1, 1, 1]),
        ([-1, -3, -1, -3], [-2, -2, -2, -2]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_one_bit_stands_for_the_mean_of_a_sign(column: list[float], values: list[float]) -> None:
    rows: Any = np.array([column], np.float32)
    factors, packed = room(rows, 1)
    codes.encode(rows, factors, packed, 1)
    found = np.empty_like(rows)
    codes.decode(found, factors, packed, 1)
    assert found.tolist() == [values]
    assert rows.tolist() == [[x - v for x, v in zip(column, values, strict=True)]]


@pytest.mark.parametrize(("bits", "lost"), [(1, 1 - 2 / np.pi), (2, 0.195), (4, 0.0238), (8, 1e-4)])
def test_what_normal_numbers_lose(bits: int, lost: float) -> None:
    rows = normal(200, 512, np.float32)
    whole = float((rows**2).sum())
    codes.encode(rows, *room(rows, bits), bits)
    assert float((rows**2).sum()) / whole == pytest.approx(lost, rel=0.2 if bits == 8 else 0.02)


@pytest.mark.parametrize("bits", BITS)
def test_equal_magnitudes_and_zeros_are_no_trap(bits: int) -> None:
    rows: Any = np.array([[1.0, -1.0] * 8, [0.0] * 16])
    codes.encode(rows, *room(rows, bits), bits)
    assert np.abs(rows[0]).max() < 0.5
    assert not rows[1].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", TYPES)
def test_rows_follow_the_formula_and_torch_agrees(bits: int, kind: type[np.floating]) -> None:
    given = normal(70, 512, kind)  # more than fit into one part
    rows, tensor = cast("Array", given.copy()), cast("Array", torch.tensor(given))
    error, factors, packed, values, twice = coded_by_arrays(rows, bits)
    assert packed.dtype == np.uint8
    assert packed.nbytes == 70 * 512 * bits / 8
    assert factors.dtype == kind
    expected = np.stack([coded(row.astype(np.float64), bits) for row in given])
    tolerance = 1e-5 if kind is np.float32 else 1e-12
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(error, given - expected, rtol=0, atol=tolerance)
    assert (twice == 2 * values).all()
    of_torch = coded_by_arrays(tensor, bits)
    assert (of_torch[2] == packed).mean() > 0.99  # sums rounded otherwise have other thresholds
    np.testing.assert_allclose(of_torch[3], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_kernel_gives_the_bits_of_numpy(
    bits: int, kind: type[np.floating], length: int
) -> None:
    given = rows_of_all_kinds(length, kind)
    expected = coded_by_arrays(given.copy(), bits)
    for rows in (given.copy(), cast("Array", torch.tensor(given))):
        for one, other in zip(coded_by_kernel(rows, bits), expected, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("bits", BITS)
def test_a_row_that_is_not_finite_stays_so(bits: int) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for coded_rows in (coded_by_arrays, coded_by_kernel):
            rows = normal(3, 512, np.float32)
            rows[1, 100] = bad
            with np.errstate(all="ignore"):
                values = coded_rows(rows, bits)[3]
            assert not np.isfinite(values[1]).all()
            assert np.isfinite(values[[0, 2]]).all()


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_lie_as_columns_are_coded_as_well(bits: int) -> None:
    given = normal(100, 70, np.float32)
    columns: Any = np.asfortranarray(given)
    whole, factors, packed, values, _ = coded_by_kernel(given, bits)
    own = room(columns, bits)
    codes.encode(columns, *own, bits)
    for one, other in zip((columns, *own), (whole, factors, packed), strict=True):
        assert (one == other).all()
    codes.decode(columns, *own, bits)
    assert (columns == values).all()
    codes.add_decoded(columns, *own, bits)
    assert (columns == 2 * values).all()
