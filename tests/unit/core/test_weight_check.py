"""Which weights of ranks count as different."""

import warnings

import numpy as np
import pytest

from hvdtrain.core.gradients.step_info import WeightSums, is_due, may_differ, sum_weights

NOISE = np.random.default_rng(0).normal(size=(400, 1000)).astype(np.float32)


def of(scale: float, itemsize: int = 4) -> WeightSums:
    """Return the sums of a large model, one of whose parameters differs by so much."""
    rows = [(f"p{number}", row + 1, itemsize) for number, row in enumerate(NOISE)]
    rows[7] = ("p7", rows[7][1] + scale * NOISE[8], itemsize)
    return sum_weights(rows)


@pytest.mark.parametrize("ranks", [2, 3, 1000])
@pytest.mark.parametrize(
    ("scale", "itemsize", "found"),
    [
        *((0, 4, False), (1e-7, 4, False), (0.02, 4, True), (1, 4, True), (0.02, 2, False)),
        (2, 2, True),
    ],
)
def test_one_parameter_of_one_rank(ranks: int, scale: float, itemsize: int, found: bool) -> None:
    plain, changed = of(0, itemsize), of(scale, itemsize)
    sums = np.sum([changed.direction] + [plain.direction] * (ranks - 1), axis=0)
    assert may_differ(ranks, *sums) == found
    assert changed.differing(plain) == ["p7"] * found


def test_differences_of_round_numbers_are_seen() -> None:
    of_ones = {size: sum_weights([("p", np.ones(size), 4)]).direction for size in (64, 1 << 14)}
    for size, direction in of_ones.items():
        for other in (-1, 0, 2, 3, 4, 1024):
            changed = sum_weights([("p", np.full(size, float(other)), 4)]).direction
            assert may_differ(2, *np.add(direction, changed)), (size, other)


def test_zeros_and_weights_that_are_no_numbers() -> None:
    zeros, ones, nan = (
        sum_weights([("p", np.full(9, value, np.float32), 4)]) for value in (0, 1, np.nan)
    )
    assert ones.differing(zeros) == ["p"]
    assert may_differ(2, *np.sum([zeros.direction, ones.direction], axis=0))
    assert nan.differing(nan) == []


def test_when_they_are_compared() -> None:
    due = [steps for steps in range(4001) if is_due(steps)]
    assert due == [*(2**power for power in range(10)), 1000, 1024, 2000, 2048, 3000, 4000]


def test_weights_that_are_not_finite_are_left_out_without_a_word() -> None:
    rows = [
        ("a", np.array([np.inf, -np.inf], np.float32), 4),
        ("b", np.array([2.0], np.float32), 4),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sum_weights(rows)
        assert found.direction == sum_weights(rows[1:]).direction
        assert found.differing(found) == []
