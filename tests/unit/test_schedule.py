"""Learning rates against worked numbers and against Horovod's formula."""

from __future__ import annotations

import itertools
import math

import pytest

from hvdtrain.train.schedule import scaled_lr, warmup_lr


def test_scaling() -> None:
    assert scaled_lr(0.1, 4, "linear") == pytest.approx(0.4)
    assert scaled_lr(0.1, 4, "sqrt") == pytest.approx(0.2)
    assert scaled_lr(0.1, 4, "none") == 0.1
    assert [scaled_lr(0.1, 1, scaling) for scaling in ("linear", "sqrt", "none")] == [0.1] * 3


def test_warmup_of_four_ranks() -> None:
    """Four ranks, ten steps an epoch, five epochs, 0.4 in the end."""
    rates = [warmup_lr(step, 10, 0.1, 0.4, 5) for step in range(60)]
    assert rates[0] == pytest.approx(0.106, abs=1e-15)
    assert rates[49] == 0.4
    assert rates[50:] == [0.4] * 10
    differences = [b - a for a, b in itertools.pairwise(rates[:50])]
    assert differences == pytest.approx([0.006] * 49)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_warmup_is_horovods(size: int) -> None:
    steps, epochs, base = 7, 3, 0.05
    target = scaled_lr(base, size, "linear")
    for epoch in range(epochs):
        for step in range(steps):
            x = epoch + step / steps + 1 / steps
            expected = target / size * (x * (size - 1) / epochs + 1)
            assert warmup_lr(epoch * steps + step, steps, base, target, epochs) == pytest.approx(
                expected
            )


def test_warmup_of_sqrt_scaling_runs_from_base_to_scaled() -> None:
    target = scaled_lr(0.1, 9, "sqrt")
    rates = [warmup_lr(step, 10, 0.1, target, 2) for step in range(21)]
    assert rates[0] == pytest.approx(0.1 + 0.2 / 20)
    assert rates[19:] == [target, target]
    assert rates == sorted(rates)


def test_no_warmup() -> None:
    assert warmup_lr(0, 10, 0.1, 0.4, 0) == 0.4
    assert {warmup_lr(step, 10, 0.1, 0.1, 5) for step in range(60)} == {0.1}


def test_warmup_that_ends_within_an_epoch() -> None:
    rates = [warmup_lr(step, 10, 0.1, 0.4, 0.55) for step in range(10)]
    assert max(rates) == 0.4
    assert rates[5:] == [0.4] * 5
    assert all(math.isfinite(rate) for rate in rates)
