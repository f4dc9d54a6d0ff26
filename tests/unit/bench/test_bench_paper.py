"""Scaling on paper: limits that are known, and figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hvdtrain_bench.analysis.link import (
    PRESETS,
    Link,
    allreduce_seconds,
    fit_link,
    hierarchical_seconds,
)
from hvdtrain_bench.analysis.paper import Work, even_work, jitter_seconds, predict, step_seconds
from hypothesis import given
from hypothesis import strategies as st

RANKS = tuple(1 << power for power in range(13))
LINK = Link("10 GB/s", 5e-6, 10e9)
MB = 10**6

counts = st.integers(1, 5000)
sizes = st.integers(0, 10**10)
links = st.builds(
    Link,
    st.just("any"),
    st.floats(1e-7, 1e-3),
    st.floats(1e6, 1e12),
    st.sampled_from([0.0, 0.5, 1.0]),
)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Return a step whose buckets are ready one after the other."""
    phases = draw(st.tuples(*[st.floats(1e-4, 10.0)] * 3))
    work = even_work("any", phases, draw(st.integers(1, 10**9)), 25 << 20, 1 << 20)
    few = st.sampled_from([0.0, 1e-3])
    return replace(work, jitter_seconds=draw(few), copy_seconds=draw(few))


@pytest.mark.parametrize(
    ("ranks", "milliseconds"),
    # 2 lg n 5 us + 2 (n-1)/n 10 ms; with 6 ranks as with 4, and 3 * 5 us + 20 ms more, or in a
    # ring 2 * 5 * 5 us + 2 * 5/6 * 10 ms
    [(1, 0.0), (2, 10.010), (4, 15.020), (8, 17.530), (6, 0.050 + 100 / 6)],
)
def test_an_allreduce_of_100_mb(ranks: int, milliseconds: float) -> None:
    assert 1e3 * allreduce_seconds(ranks, 100 * MB, LINK) == pytest.approx(milliseconds)


@given(counts, sizes, links)
def test_no_allreduce_beats_its_lower_bounds(ranks: int, nbytes: int, link: Link) -> None:
    found = allreduce_seconds(ranks, nbytes, link)
    assert found >= 2 * (ranks - 1) / ranks * nbytes / link.bytes_per_second * (1 - 1e-9)
    assert found >= (ranks - 1).bit_length() * link.latency_seconds * (1 - 1e-9)
    assert allreduce_seconds(ranks, nbytes + 1000, link) >= found


@given(works(), links)
def test_one_rank_is_perfectly_efficient(work: Work, link: Link) -> None:
    (found,) = predict(work, [1], link)
    assert found.seconds == pytest.approx(work.compute_seconds)
    assert (found.efficiency, found.exposed_seconds) == (1.0, 0.0)


@given(works())
def test_with_a_perfect_link_a_step_is_its_computation(work: Work) -> None:
    quiet = replace(work, jitter_seconds=0.0)
    alone, *others = predict(quiet, RANKS, Link("perfect", 0.0, inf))
    for found in others:
        assert found.seconds == pytest.approx(work.compute_seconds + work.copy_seconds)
        assert found.efficiency == pytest.approx(alone.seconds / found.seconds)
        assert found.exposed_seconds == pytest.approx(0.0)


@given(works(), links)
def test_more_ranks_never_help_a_rank(work: Work, link: Link) -> None:
    efficiencies = [found.efficiency for found in predict(work, RANKS, link)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(efficiencies))


def test_one_bucket_hides_nothing() -> None:
    work = Work("one", 0.03, 0.06, 0.01, ((100 * MB, 0.06),))
    assert step_seconds(work, 4, lambda _: 0.5) == pytest.approx(0.6)


def test_early_buckets_are_hidden_behind_backward() -> None:
    work = Work("two", 0.03, 0.06, 0.01, ((1, 0.01), (2, 0.06)))
    # The first is done 0.01 + 0.02 after the start of backward, the second 0.06 + 0.02.
    assert step_seconds(work, 4, lambda _: 0.02) == pytest.approx(0.03 + 0.08 + 0.01)
    # A channel that is still busy holds the second one up: 0.01 + 2 * 0.07.
    assert step_seconds(work, 4, lambda _: 0.07) == pytest.approx(0.03 + 0.15 + 0.01)


def test_gradients_are_copied_before_they_are_reduced() -> None:
    work = Work("two", 0.03, 0.06, 0.01, ((1, 0.01), (3, 0.06)), copy_seconds=0.04)
    # A quarter of the copies is done before the first bucket goes, all of them before the second.
    assert step_seconds(work, 4, lambda _: 0.02) == pytest.approx(0.03 + 0.10 + 0.02 + 0.01)
    assert step_seconds(work, 4, lambda _: 0.09) == pytest.approx(0.03 + 0.02 + 0.18 + 0.01)


def test_a_core_that_adds_does_not_compute() -> None:
    work = Work("two", 0.03, 0.06, 0.01, ((1, 0.01), (2, 0.06)))
    assert step_seconds(work, 4, lambda _: 0.02, core_share=1.0) == pytest.approx(0.1 + 2 * 0.02)


@pytest.mark.parametrize(("ranks", "deviations"), [(1, 0.0), (8, 1.42), (64, 2.34)])
def test_a_step_waits_for_its_slowest_rank(ranks: int, deviations: float) -> None:
    work = Work("noise", 0.0, 0.0, 0.0, (), jitter_seconds=1.0)
    assert step_seconds(work, ranks, lambda _: 0.0) == pytest.approx(deviations, rel=0.02)


def test_jitter_is_what_ranks_do_not_share() -> None:
    assert jitter_seconds([[1.0, 5.0, 2.0], [1.0, 5.0, 2.0]]) == 0.0
    assert jitter_seconds([[1.0, 2.0]]) == 0.0
    # Of two ranks the slower is 0.56 standard deviations above their mean.
    assert jitter_seconds([[1.0, 7.0], [3.0, 5.0]]) == pytest.approx(1 / 0.564, rel=0.05)


@given(st.integers(2, 64), links)
def test_a_fit_finds_the_link_that_made_the_times(ranks: int, link: Link) -> None:
    points = [(size, allreduce_seconds(ranks, size, link)) for size in (0, MB, 64 * MB)]
    if ranks & (ranks - 1) == 0:  # for other numbers the best algorithm depends on the size
        found = fit_link("fit", ranks, points)
        assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=1e-3)
        assert found.bytes_per_second == pytest.approx(link.bytes_per_second, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "points", "reason"),
    [
        (1, [(1, 1.0), (2, 2.0)], "two ranks or more"),
        (2, [(1, 1.0), (1, 2.0)], "two sizes"),
        (2, [(1, 2.0), (10, 1.0)], "do not grow"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    ranks: int, points: list[tuple[int, float]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        fit_link("fit", ranks, points)


def test_ranks_of_a_node_share_its_card() -> None:
    node, network = Link("node", 1e-6, 100e9), PRESETS["hdr"]
    one_node = hierarchical_seconds(8, 8, 100 * MB, node, network)
    assert one_node == allreduce_seconds(8, 100 * MB, node)
    # Between 4 nodes: 2 lg 4 latencies, and 2 * 3/4 of 100 MB through each card.
    between = 4 * 1.5e-6 + 1.5 * 100 * MB / 25e9
    four_nodes = hierarchical_seconds(32, 8, 100 * MB, node, network)
    assert four_nodes == pytest.approx(one_node + between)
    assert hierarchical_seconds(4, 1, MB, node, network) == allreduce_seconds(4, MB, network)


@given(works())
def test_even_buckets_hold_all_gradients(work: Work) -> None:
    assert [ready for _, ready in work.buckets] == sorted(ready for _, ready in work.buckets)
    assert work.buckets[-1][1] == pytest.approx(work.backward_seconds)
    assert all(0 < nbytes <= 25 << 20 for nbytes, _ in work.buckets)
    assert work.buckets[0][0] <= 1 << 20


def test_presets_are_what_they_are_called() -> None:
    gigabits = {name: 8e-9 * link.bytes_per_second for name, link in PRESETS.items()}
    assert gigabits == pytest.approx({"25gbe": 25, "hdr": 200, "nvlink": 2400})
