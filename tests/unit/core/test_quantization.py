"""Codes of few bits: known columns, the loss of normal numbers, packing, numpy against torch."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from compression_formulas import coded

from hvdtrain.arrays import Array, to_host
from hvdtrain.core.compression.codes import BITS, decode, encode, pack, unpack

TYPES = (np.float32, np.float64)


def normal(rows: int, length: int, kind: type[np.floating]) -> Any:
    return np.random.default_rng(rows).standard_normal((rows, length)).astype(kind)


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
    codes, factors = encode(rows, 1)
    assert to_host(decode(codes, factors)).tolist() == [values]
    assert rows.tolist() == [[x - v for x, v in zip(column, values, strict=True)]]


@pytest.mark.parametrize(("bits", "lost"), [(1, 1 - 2 / np.pi), (2, 0.195), (4, 0.0238), (8, 1e-4)])
def test_what_normal_numbers_lose(bits: int, lost: float) -> None:
    rows = normal(200, 512, np.float32)
    whole = float((rows**2).sum())
    encode(rows, bits)
    assert float((rows**2).sum()) / whole == pytest.approx(lost, rel=0.2 if bits == 8 else 0.02)


@pytest.mark.parametrize("bits", BITS)
def test_equal_magnitudes_and_zeros_are_no_trap(bits: int) -> None:
    rows: Any = np.array([[1.0, -1.0] * 8, [0.0] * 16])
    encode(rows, bits)
    assert np.abs(rows[0]).max() < 0.5
    assert not rows[1].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", TYPES)
def test_rows_follow_the_formula_and_torch_agrees(bits: int, kind: type[np.floating]) -> None:
    given = normal(70, 512, kind)  # more than fit into one part
    rows, tensor = given.copy(), cast("Array", torch.tensor(given))
    codes, factors = encode(rows, bits)
    assert to_host(codes).dtype == np.uint8
    assert to_host(factors).dtype == kind
    values = decode(codes, factors)
    expected = np.stack([coded(row.astype(np.float64), bits) for row in given])
    tolerance = 1e-5 if kind is np.float32 else 1e-12
    np.testing.assert_allclose(to_host(values), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(rows, given - expected, rtol=0, atol=tolerance)
    of_torch = decode(*encode(tensor, bits))
    np.testing.assert_allclose(to_host(of_torch), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 64, 1001])
def test_packed_codes_come_out_again(bits: int, count: int) -> None:
    codes: Any = np.random.default_rng(count).integers(0, 2**bits, count, np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (-(-count * bits // 8),)
    assert (to_host(unpack(packed, bits, count)) == codes).all()
    of_torch = pack(cast("Array", torch.tensor(codes)), bits)
    assert (to_host(of_torch) == packed).all()
