"""When benchmarks call a difference a difference."""

from __future__ import annotations

from math import comb

import pytest
from hvdtrain_bench.analysis.statistics import compare, median_interval
from hypothesis import given
from hypothesis import strategies as st

times = st.floats(1e-6, 1e3)
enough = st.lists(times, min_size=8, max_size=30)


@given(enough)
def test_the_same_times_do_not_differ(values: list[float]) -> None:
    found = compare(values, values)
    assert (found.ratio, found.low, found.high, found.differs) == (1.0, 1.0, 1.0, False)


@given(enough, st.floats(1.05, 100.0))
def test_a_constant_factor_differs_whatever_the_spread(values: list[float], factor: float) -> None:
    slower = [factor * value for value in values]
    found = compare(values, slower)
    assert found.differs
    assert found.ratio == pytest.approx(factor)
    assert compare(slower, values).ratio == pytest.approx(1 / factor)
    assert compare(slower, values).size == pytest.approx(factor)


@given(st.lists(st.tuples(times, times), min_size=8, max_size=30))
def test_numbers_are_in_order_and_turn_round(pairs: list[tuple[float, float]]) -> None:
    base, other = zip(*pairs, strict=True)
    there, back = compare(base, other), compare(other, base)
    assert there.low <= there.ratio * (1 + 1e-12)
    assert there.ratio <= there.high * (1 + 1e-12)
    assert there.interval is not None
    assert back.interval is not None
    assert there.interval[0] == pytest.approx(1 / back.interval[1])


def test_what_the_same_code_shows_is_noise() -> None:
    base, other = [1.0] * 9, [1.10, 1.12, 1.11, 1.13, 1.09, 1.10, 1.12, 1.11, 1.10]
    assert compare(base, other).differs
    assert compare(base, other, noise=1.09).differs
    assert not compare(base, other, noise=1.15).differs


@pytest.mark.parametrize("count", range(1, 41))
def test_the_interval_is_the_tightest_with_its_confidence(count: int) -> None:
    def confidence(left_out: int) -> float:
        return 1 - 2 * sum(comb(count, below) for below in range(left_out)) / 2**count

    interval = median_interval(list(range(count)))
    if interval is None:
        assert confidence(1) < 0.99
    else:
        left_out = int(interval[0]) + 1
        assert interval[1] == count - left_out
        assert confidence(left_out) >= 0.99
        assert confidence(left_out + 1) < 0.99


def test_repeats_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        compare([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="got 0 and 0"):
        compare([], [])
