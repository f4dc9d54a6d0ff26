"""Predicted intervals, from measurements that are made up, and how they are checked."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.scaling.paper import Work, interval_of, seconds_on
from hvdtrain_bench.scaling.predictions import check_predictions, links_of, steps_of
from hvdtrain_bench.scaling.report import check_line
from hvdtrain_bench.scaling.scheme import Cluster, Link, allreduce_seconds

from hvdtrain.errors import HvdtrainError

MB = 10**6
BUCKETS = ((100_000_000, 0.06),)
NODE, NETWORK = Link("node", 5e-6, 10e9), Link("network", 5e-5, 125e6)
SPENT = allreduce_seconds(2, 100 * MB, NODE)  # by two ranks of a node
WORK = Work("made", 0.03, 0.06, 0.01, BUCKETS, jitter_seconds=0.0, copy_seconds=0.0)


def profile(
    ranks: int, nodes: int, seconds: list[float], links: list[list[Any]], **extra: float
) -> Result:
    """Return a profile of WORK on a cluster of NODE and NETWORK, each repeat a little slower."""
    names = ("forward", "backward", "optimizer", "copy", "jitter")
    phases = {f"{name}_seconds": getattr(WORK, f"{name}_seconds") for name in names}
    work = {"name": WORK.name, "buckets": BUCKETS, "repeats": [phases] * len(seconds)}
    found: dict[str, Any] = {"link": links, "core_share": 0.0, "crowding": 1.0}
    found["works"] = {"made": {**work, "schemes": []}}
    case = Case("made", {}, "seconds", {"copied": [0.1], "hvdtrain": seconds}, "copied")
    return Result("profile", ranks, nodes, [], {}, [case], {**found, **extra})


def points(cluster: Cluster, ranks: int, factors: list[float]) -> list[list[Any]]:
    return [
        [size, [factor * _allreduce(cluster, ranks, size) for factor in factors]]
        for size in (0, 100 * MB)
    ]


def _allreduce(cluster: Cluster, ranks: int, nbytes: float) -> float:
    quiet = Work("none", 0.0, 0.0, 0.0, ((int(nbytes), 0.0),))
    return seconds_on(quiet, ranks, cluster)


def test_an_interval_leaves_out_five_percent_on_each_side() -> None:
    found = interval_of([float(n) for n in range(101)])
    assert (found.low, found.middle, found.high) == (5.0, 50.0, 95.0)
    assert found.contains(5.0)
    assert not found.contains(4.9)
    assert set(vars(interval_of([2.0])).values()) == {2.0}


def test_computing_while_communicating_is_as_slow_as_every_other_turn_tells() -> None:
    turns = [0.1 + SPENT, 9.0, 0.11 + SPENT, 9.0, 0.12 + SPENT, 9.0]
    base = profile(2, 1, turns, points(Cluster(NODE), 2, [1.0] * 6))
    (steps,) = steps_of(base)
    assert {round(work.compute_seconds, 9) for work in steps.alone} == {0.1}
    found = {round(work.compute_seconds, 9) for work in steps.works}
    assert found == {0.1, 0.11, 0.12}
    (check,) = check_predictions([base])
    assert list(check.turns) == [9.0] * 3
    assert (check.predicted.low, check.predicted.high) == pytest.approx((0.1 + SPENT, 0.12 + SPENT))
    assert check.turns_inside == 0
    assert check.error == pytest.approx((0.11 + SPENT) / 9 - 1)
    assert check_line([check]).startswith("0 of 1 measured steps, and 0 of 3 of their turns, lie")


@pytest.mark.parametrize("crowding", [1.0, 2.0, 4.0])
def test_ranks_that_share_cores_take_longer(crowding: float) -> None:
    base = profile(
        2, 1, [0.1 + allreduce_seconds(2, 100 * MB, NODE)], points(Cluster(NODE), 2, [1.0])
    )
    slow = NODE.slowed(crowding)
    expected = 0.1 * crowding + allreduce_seconds(4, 100 * MB, slow)
    crowded = profile(4, 1, [expected], points(Cluster(slow), 4, [1.0]), crowding=crowding)
    first, second = check_predictions([base, crowded])
    assert first.error == pytest.approx(0, abs=1e-9)
    assert second.error == pytest.approx(0, abs=1e-9)
    assert second.efficiency == pytest.approx(0.1 / expected)


def test_on_one_node_nothing_is_compressed() -> None:
    base = profile(2, 1, [0.1 + SPENT], points(Cluster(NODE), 2, [1.0]))
    case = replace(base.cases[0], values={**base.cases[0].values, "half": [0.1 + SPENT]})
    works = {"made": {**base.extra["works"]["made"], "schemes": [{"name": "half", "rate": 0.5}]}}
    with_half = replace(base, cases=[case], extra={**base.extra, "works": works})
    _, check = check_predictions([with_half])
    assert check.scheme == "half"
    assert check.error == pytest.approx(0, abs=1e-9)


def test_a_slow_network_is_not_taken_for_slow_computing() -> None:
    base = profile(2, 2, [0.9], points(Cluster(NETWORK), 2, [1.0]))
    (steps,) = steps_of(base)
    assert steps.works[0].compute_seconds == pytest.approx(0.1)


def test_times_that_no_link_fits_are_an_error_in_one_line() -> None:
    flat = profile(2, 1, [0.2], [[0, [1.0]], [100 * MB, [0.5]]])
    with pytest.raises(HvdtrainError, match="no link fits the all-reduces of 2 ranks"):
        links_of(flat)


def test_the_network_is_what_all_reduces_take_beyond_those_of_a_node() -> None:
    base = profile(
        2, 1, [0.1 + allreduce_seconds(2, 100 * MB, NODE)], points(Cluster(NODE), 2, [1.0])
    )
    wide = Cluster(NETWORK, NODE, 2)
    expected = seconds_on(WORK, 4, wide)
    across = profile(4, 2, [expected], points(wide, 4, [1.0]))
    _, check = check_predictions([base, across])
    assert check.error == pytest.approx(0, abs=1e-6)


def test_intervals_contain_what_follows_from_the_same_spread() -> None:
    """Turns and links that vary as those from which intervals are made."""
    random = Random(1)

    def noisy(count: int) -> list[float]:
        return [random.gauss(1.0, 0.02) for _ in range(count)]

    spent = [factor * SPENT for factor in noisy(40)]
    turns = [0.1 * a + b for a, b in zip(noisy(40), spent, strict=True)]
    base = profile(2, 1, turns, points(Cluster(NODE), 2, noisy(40)))
    (check,) = check_predictions([base])
    assert check.predicted.contains(check.seconds)
    assert 16 <= check.turns_inside <= 20
