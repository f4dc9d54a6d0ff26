"""Times of contenders, and when they differ."""

from __future__ import annotations

import numpy as np
import pytest
from hvdtrain_compare.figures.judge import (
    TOO_FEW_REPEATS,
    WITHIN_THE_NOISE,
    Ratio,
    Timing,
    judge,
    judge_same,
    noise_of,
    ratio_to,
    time_steps,
    without_start,
)
from hvdtrain_compare.figures.texts import (
    bytes_text,
    difference_text,
    interval_text,
    noise_text,
    ratio_text,
    score_text,
    time_text,
)

NO_NOISE = noise_of([])


def measured(middle: float, seed: int, repeats: int = 5, drift: float = 0.0) -> Timing:
    """Return a timing of 300 noisy steps a repeat, whose repeats drift apart by so much."""
    noise = np.random.default_rng(seed)
    return time_steps(
        [
            list(middle * noise.lognormal(0, drift) * noise.lognormal(0, 0.2, 300))
            for _ in range(repeats)
        ]
    )


def ratio(*repeats: float) -> Ratio:
    """Return the ratio of repeats whose base takes a second."""
    return ratio_to(time_steps([[1.0]] * len(repeats)), time_steps([[one] for one in repeats]))


def test_the_first_steps_do_not_count() -> None:
    assert without_start([9.0, 1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert without_start([9.0]) == [9.0]
    assert len(without_start([1.0] * 100)) == 90


def test_the_interval_holds_the_quartiles_and_the_median_of_each_repeat() -> None:
    timing = time_steps([[1.0, 2.0, 3.0], [10.0, 10.0, 10.0], [2.0]])
    assert timing.seconds == 2.0
    assert timing.repeats == (2.0, 10.0, 2.0)
    assert (timing.low, timing.high) == (2.0, 10.0)


@pytest.mark.parametrize("repeats", [3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_a_clear_difference_is_seen_although_steps_vary(seed: int, repeats: int) -> None:
    one, slow = measured(1e-3, seed, repeats), measured(1.27e-3, seed + 100, repeats)
    assert one.high > slow.low  # single steps say nothing
    assert judge(ratio_to(one, slow), NO_NOISE) == "slower"
    assert judge(ratio_to(slow, one), NO_NOISE) == "faster"


@pytest.mark.parametrize("drift", [0.0, 0.02, 0.3])
def test_equal_contenders_are_rarely_told_apart(drift: float) -> None:
    pairs = [(measured(1, s, 3, drift), measured(1, s + 500, 3, drift)) for s in range(200)]
    said = [judge(ratio_to(one, two), NO_NOISE) for one, two in pairs]
    assert said.count(WITHIN_THE_NOISE) >= 180


def test_the_same_code_never_differs() -> None:
    assert judge_same(ratio(1.0, 1.01, 0.99)) == "same code, no difference"
    assert judge_same(ratio(1.5, 1.51, 1.52)) == "same code, no difference"
    assert judge_same(ratio(1.0, 1.0)) == f"same code, {TOO_FEW_REPEATS}"


def test_what_the_same_code_shows_is_within_the_noise() -> None:
    assert noise_of([ratio(1.0, 1.0, 1.0)]) == 1.02
    noise = noise_of([ratio(0.8, 1.0, 1.1), ratio(1.0, 1.2, 1.0)])
    assert noise == 1.25
    assert judge(ratio(1.24, 1.25, 1.26), noise) == WITHIN_THE_NOISE
    assert judge(ratio(1.26, 1.27, 1.26), noise) == "slower"
    assert judge(ratio(0.81, 0.79, 0.79), noise) == WITHIN_THE_NOISE
    assert judge(ratio(0.78, 0.79, 0.79), noise) == "faster"
    assert noise_text(ratio(0.8, 1.0, 1.1), noise) == (
        "the same code took 0.80 to 1.10 of its own time: ratios of 0.80 to 1.25 are noise"
    )


@pytest.mark.parametrize(
    ("repeats", "said"),
    [
        ((9.0,), TOO_FEW_REPEATS),
        ((9.0, 9.0), TOO_FEW_REPEATS),
        ((9.0, 9.0, 9.0), "slower"),
        ((1.015, 1.015, 1.015), WITHIN_THE_NOISE),
        ((1.5, 1.5, 1.5, 1.5, 0.99), WITHIN_THE_NOISE),
        ((1.03, 1.3, 1.9), WITHIN_THE_NOISE),  # three that vary as much
        ((0.5, 0.27, 0.63, 0.4, 0.55), "faster"),
    ],
)
def test_what_repeats_say(repeats: tuple[float, ...], said: str) -> None:
    assert judge(ratio(*repeats), NO_NOISE) == said


def test_ratios_are_those_of_the_same_repeat() -> None:
    found = ratio_to(time_steps([[1.0], [2.0], [4.0]]), time_steps([[2.0], [2.0], [6.0]]))
    assert found == Ratio(1.5, 1.0, 2.0, (2.0, 1.0, 1.5))
    assert ratio_text(found) == "1.50 (1.00-2.00)"
    assert ratio_text(Ratio(2.0, 2.0, 2.0, (2.0,))) == "2.00"


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
