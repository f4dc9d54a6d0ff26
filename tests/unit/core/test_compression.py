"""Parts of compressed exchanges: largest elements, sides of matrices, coded rows, half types."""

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from coded_rows import coded, normal, room
from compression_formulas import coded as formula

from hvdtrain.arrays import Array, HostArray, to_host
from hvdtrain.core.exchanges import codes
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.codes import BITS
from hvdtrain.core.exchanges.half import round_to_half, widen_half
from hvdtrain.core.exchanges.power_sgd import matrix_shape
from hvdtrain.core.exchanges.top_k import largest
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.types import DType


def both(values: Any) -> list[Any]:
    return [values, cast("Array", torch.tensor(values))]


def test_largest_elements_where_a_sample_says_nothing() -> None:
    """All but ten are zero; then NaN and infinity, which come before all others."""
    values = np.zeros(100_000)
    values[5::10_000] = range(1, 11)
    expected = list(range(90_005, 0, -10_000))
    for elements in both(values):
        assert to_host(largest(elements, 12)).tolist() == [*expected, 0, 1]
    values[7], values[3] = np.nan, -np.inf
    for elements in both(values):
        assert to_host(largest(elements, 3)).tolist() == [3, 7, 90_005]


@pytest.mark.parametrize(
    ("shape", "strides", "sides"),
    [
        *(((), (), (1, 1)), ((7,), (1,), (1, 7)), ((3, 5), (5, 1), (3, 5))),
        *(((3, 5), (1, 3), (5, 3)), ((64, 32, 3, 3), (288, 9, 3, 1), (64, 288))),
        *(((3, 3, 32, 64), (6144, 2048, 64, 1), (288, 64)), ((0, 5), (5, 1), (1, 0))),
    ],
)
def test_sides_of_a_matrix(
    shape: tuple[int, ...], strides: tuple[int, ...], sides: tuple[int, int]
) -> None:
    spec = ParameterSpec("p", shape, strides, DType.FLOAT32, "float32", "cpu")
    assert matrix_shape(spec) == sides


def test_indices_of_the_largest_elements_have_room() -> None:
    for dtype, fits in ((DType.FLOAT32, False), (DType.FLOAT64, True)):
        spec = ParameterSpec("p", (1 << 31,), (1,), dtype, dtype.value, "cpu")
        plan = make_plan([spec], 1 << 20, 1 << 20)
        with nullcontext() if fits else pytest.raises(ValueError, match="one of 2147483648: "):
            make_exchange("topk").prepare(plan)


TYPES = (np.float32, np.float64)


@pytest.mark.parametrize("bits", BITS)
def test_equal_magnitudes_and_zeros_are_no_trap(bits: int) -> None:
    rows: Any = np.array([[1.0, -1.0] * 8, [0.0] * 16])
    codes.code("encode", rows, *room(rows, bits), bits)
    assert np.abs(rows[0]).max() < 0.5
    assert not rows[1].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", TYPES)
def test_rows_follow_the_formula_and_torch_agrees(bits: int, kind: type[np.floating]) -> None:
    given = normal(70, 512, kind)  # more than fit into one part
    rows, tensor = cast("Array", given.copy()), cast("Array", torch.tensor(given))
    error, factors, packed, values, twice = coded(codes.code_arrays, rows, bits)
    assert packed.dtype == np.uint8
    assert packed.nbytes == 70 * 512 * bits / 8
    assert factors.dtype == kind
    expected = np.stack([formula(row.astype(np.float64), bits) for row in given])
    tolerance = 1e-5 if kind is np.float32 else 1e-12
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(error, given - expected, rtol=0, atol=tolerance)
    assert (twice == 2 * values).all()
    of_torch = coded(codes.code_arrays, tensor, bits)
    assert (of_torch[2] == packed).mean() > 0.99  # sums rounded otherwise have other thresholds
    np.testing.assert_allclose(of_torch[3], expected, rtol=0, atol=tolerance)


def some_values() -> HostArray:
    """Return ties, numbers of all magnitudes, and what is not finite, with both signs."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    values = np.concatenate([bits, ties, (bits & 0xFFFFE000) | 0x1000]).view(np.float32)
    special = np.array([0, 1e-45, 6e-8, 65504, 65520, 3.4e38, np.inf, np.nan], np.float32)
    return np.concatenate([values, special, -special])


@pytest.mark.parametrize("half", [DType.FLOAT16, DType.BFLOAT16])
def test_numpy_rounds_as_torch_does(half: DType) -> None:
    values: Any = some_values()
    tensor: Any = torch.from_numpy(values.copy())
    expected = round_to_half(tensor, half)
    with np.errstate(all="ignore"):
        found = widen_half(round_to_half(values, half), half)
    np.testing.assert_array_equal(found, np.asarray(widen_half(expected, half)))
