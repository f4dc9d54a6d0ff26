"""Parts of compressed exchanges: largest elements, orthonormal rows, sides of matrices."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch

from hvdtrain.arrays import Array, to_host
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.power_sgd import matrix_shape, orthonormal
from hvdtrain.core.exchanges.top_k import largest
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.types import DType


def both(values: Any) -> list[Any]:
    """Return an array in numpy's and in torch's memory."""
    return [values, cast("Array", torch.tensor(values))]


@pytest.mark.parametrize("count", [1, 100, 5000, 100_000])
def test_largest_elements_with_many_ties(count: int) -> None:
    """Of 100000 elements with 200 different magnitudes."""
    values = np.random.default_rng(0).integers(-200, 200, 100_000).astype(np.float32)
    expected = np.argsort(-np.abs(values), kind="stable")[:count]
    for elements in both(values):
        assert (to_host(largest(elements, count)) == expected).all()


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


@pytest.mark.parametrize("scale", [1e-25, 1e-6, 1.0, 1e12])
def test_orthonormal_rows(scale: float) -> None:
    """The third depends on the others, and the fourth is zero."""
    rows = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    rows[2], rows[3] = rows[0] - 2 * rows[1], 0
    for given in both(rows * np.float32(scale)):
        made = to_host(orthonormal(given))
        np.testing.assert_allclose(made @ made.T, np.diag([1, 1, 1, 0]), atol=1e-6)
        first = rows[1] / np.linalg.norm(rows[1])
        np.testing.assert_allclose(made[:2].T @ (made[:2] @ first), first, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "strides", "sides"),
    [
        ((), (), (1, 1)),
        ((7,), (1,), (1, 7)),
        ((3, 5), (5, 1), (3, 5)),
        ((3, 5), (1, 3), (5, 3)),
        ((64, 32, 3, 3), (288, 9, 3, 1), (64, 288)),
        ((3, 3, 32, 64), (6144, 2048, 64, 1), (288, 64)),
        ((0, 5), (5, 1), (1, 0)),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nbit:bits=3", "bits must be 1, 2, 4 or 8, got 3"),
        ("nbit:block=100", "block must be a multiple of 8, or 0 for columns, got 100"),
        ("powersgd:rank=0", "rank must be at least 1, got 0"),
        ("powersgd:min_rate=nan", "min_rate must be a positive number, got nan"),
        ("topk:ratio=0", "ratio must be above 0 and at most 1, got 0.0"),
        ("topk:momentum=1", "momentum must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_wrong_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_exchange(text)
