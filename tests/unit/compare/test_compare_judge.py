"""Times of contenders, and when they differ."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.compare.figures.judge import (
    DIFFERS_FROM_ITSELF,
    NO_DIFFERENCE,
    Ratio,
    judge,
    ratio_to,
    time_steps,
    without_start,
)
from hvdtrain.compare.figures.texts import (
    bytes_text,
    difference_text,
    interval_text,
    ratio_text,
    score_text,
    time_text,
)


def repeats(middle: float, seed: int, count: int = 3) -> list[list[float]]:
    noise = np.random.default_rng(seed)
    return [list(middle * noise.lognormal(0, 0.1, 80)) for _ in range(count)]


def test_the_first_steps_do_not_count() -> None:
    assert without_start([9.0, 1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert without_start([9.0]) == [9.0]
    assert len(without_start([1.0] * 100)) == 90


def test_the_interval_holds_the_quartiles_and_the_median_of_each_repeat() -> None:
    timing = time_steps([[1.0, 2.0, 3.0], [10.0, 10.0, 10.0], [2.0]])
    assert timing.seconds == 2.0
    assert timing.repeats == (2.0, 10.0, 2.0)
    assert (timing.low, timing.high) == (2.0, 10.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_contender_does_not_differ_from_itself(seed: int) -> None:
    one, two = time_steps(repeats(1e-3, seed)), time_steps(repeats(1e-3, seed + 100))
    assert judge(one, two, same=True) == NO_DIFFERENCE


def test_what_differs() -> None:
    one, slow = time_steps(repeats(1e-3, 0)), time_steps(repeats(2e-3, 1))
    assert judge(one, slow, same=False) == "slower"
    assert judge(slow, one, same=False) == "faster"
    assert judge(one, slow, same=True) == DIFFERS_FROM_ITSELF
    assert judge(time_steps([[1.0, 1.0]]), time_steps([[1.01, 1.01]]), False) == NO_DIFFERENCE


def test_ratios_are_those_of_the_same_repeat() -> None:
    ratio = ratio_to(time_steps([[1.0], [2.0], [4.0]]), time_steps([[2.0], [2.0], [6.0]]))
    assert ratio == Ratio(1.5, 1.0, 2.0)
    assert ratio_text(ratio) == "1.50 (1.00-2.00)"
    assert ratio_text(Ratio(2.0, 2.0, 2.0)) == "2.00"


def test_figures_have_units() -> None:
    assert [time_text(s) for s in (None, 8.12e-5, 3.412e-3, 2.5)] == [
        "-",
        "81.2 us",
        "3.41 ms",
        "2.5 s",
    ]
    assert interval_text(9e-4, 1.2e-3) == "0.9 to 1.2 ms"
    assert [bytes_text(n) for n in (None, 0, 312e3, 1.5e9)] == ["-", "0 B", "312 kB", "1.5 GB"]
    assert [difference_text(d) for d in (None, 0.0, 2.98e-8)] == ["-", "0", "3.0e-08"]
    assert score_text("loss", 0.5) == "0.5000"
    assert score_text("accuracy", 0.5) == "50.00 %"
    assert score_text("loss", float("nan")) == "not finite"
