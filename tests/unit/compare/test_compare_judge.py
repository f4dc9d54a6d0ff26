"""Times of contenders, and when they differ."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hvdtrain_compare.figures import (
    TOO_FEW_REPEATS,
    WITHIN_THE_NOISE,
    Ratio,
    SampleCount,
    Timing,
    count_samples,
    judge,
    judge_same,
    largest_difference,
    noise_of,
    noise_text,
    ratio_text,
    ratio_to,
    time_steps,
    without_start,
)
from hvdtrain_compare.protocol import Place
from hvdtrain_compare.torch.division import Division, ExactDivision, PaddedDivision
from hypothesis import given
from hypothesis import strategies as st

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


def of(*parts: list[int]) -> list[np.ndarray]:
    return [np.array(part, np.int64) for part in parts]


def test_duplicates_and_losses() -> None:
    assert count_samples(of([0, 2], [1, 3]), 4) == SampleCount(4, 4, 0, 0)
    assert count_samples(of([0, 2, 0], [1, 0]), 4) == SampleCount(4, 5, 2, 1)
    assert count_samples(of([], []), 2) == SampleCount(2, 0, 0, 2)
    assert count_samples(of([0, 2, 0], [1, 0]), 4).text == "5, 2 twice, 1 never"
    assert count_samples(of([1], [0]), 2).text == "2"
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        count_samples(of([0], [2]), 2)


@given(
    st.integers(1, 200),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([ExactDivision, PaddedDivision]),
)
def test_divisions(samples: int, size: int, each: int, kind: type) -> None:
    """All processes together take in each step what one process would take."""
    order = np.random.default_rng(samples).permutation(samples).astype(np.int64)
    ranks: list[Division] = [kind(Place(rank, size), size * each) for rank in range(size)]
    shares = [rank.train_shares(order) for rank in ranks]
    alone = ExactDivision(Place(0, 1), size * each).train_shares(order)
    assert {len(share) for share in shares} == {len(alone)}
    for step, whole in enumerate(alone[:-1]):
        together = np.concatenate([share[step] for share in shares])
        assert sorted(together) == sorted(whole)
    seen = count_samples([np.concatenate(share) for share in shares], samples)
    tested = count_samples([rank.test_share(samples) for rank in ranks], samples)
    padding = 0 if kind is ExactDivision else -samples % size
    assert (seen.lost, seen.duplicates) == (0, padding)
    assert (tested.lost, tested.duplicates) == (0, padding)


def test_the_largest_difference() -> None:
    one = {"a": np.array([1.0, 2.0]), "b": np.array([[3.0]])}
    other = {"a": np.array([1.0, 2.5]), "b": np.array([[2.75]])}
    assert largest_difference(one, other) == 0.5
    assert largest_difference(one, one) == 0
    assert math.isnan(largest_difference(one, {**other, "b": np.array([[np.nan]])}))
    with pytest.raises(ValueError, match="differ in b"):
        largest_difference(one, {**one, "b": np.zeros(2)})
