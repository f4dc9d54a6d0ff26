"""Scaling on paper: known limits, predicted intervals, and how they are checked."""

from typing import Any

import pytest
from hvdtrain_bench.analysis.report import check_line
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.scaling.paper import (
    AVERAGE,
    PRESETS,
    Cluster,
    Link,
    Scheme,
    Work,
    allreduce_seconds,
    backward_seconds,
    seconds_on,
    step_seconds,
)
from hvdtrain_bench.scaling.predictions import check_predictions, links_of, steps_of

from hvdtrain.errors import HvdtrainError

LINK = Link("10 GB/s", 5e-6, 10e9)
MB = 10**6


@pytest.mark.parametrize(
    ("ranks", "milliseconds"),
    # 2 lg n 5 us + 2 (n-1)/n 10 ms; with 6 ranks as with 4, and 3 * 5 us + 20 ms more, or in a
    # ring 2 * 5 * 5 us + 2 * 5/6 * 10 ms
    [(1, 0.0), (2, 10.010), (4, 15.020), (8, 17.530), (6, 0.050 + 100 / 6)],
)
def test_an_allreduce_of_100_mb(ranks: int, milliseconds: float) -> None:
    assert 1e3 * allreduce_seconds(ranks, 100 * MB, LINK) == pytest.approx(milliseconds)


def test_early_buckets_are_hidden_behind_backward() -> None:
    work = Work("two", 0.03, 0.06, 0.01, ((1, 0.01), (2, 0.06)))
    # The first is done 0.01 + 0.02 after the start of backward, the second 0.06 + 0.02.
    assert step_seconds(work, 4, lambda _: 0.02) == pytest.approx(0.03 + 0.08 + 0.01)
    # A channel that is still busy holds the second one up: 0.01 + 2 * 0.07.
    assert step_seconds(work, 4, lambda _: 0.07) == pytest.approx(0.03 + 0.15 + 0.01)


@pytest.mark.parametrize(("ranks", "deviations"), [(1, 0.0), (8, 1.42), (64, 2.34)])
def test_a_step_waits_for_its_slowest_rank(ranks: int, deviations: float) -> None:
    work = Work("noise", 0.0, 0.0, 0.0, (), jitter_seconds=1.0)
    assert step_seconds(work, ranks, lambda _: 0.0) == pytest.approx(deviations, rel=0.02)


def test_ranks_of_a_node_share_its_card() -> None:
    node, network = Link("node", 1e-6, 100e9), PRESETS["hdr"]
    cluster = Cluster(network, node, 8)
    one_node = backward_seconds(cluster, AVERAGE, 8, 100 * MB)
    assert one_node == allreduce_seconds(8, 100 * MB, node)
    # Between 4 nodes: 2 lg 4 latencies, and 2 * 3/4 of 100 MB through each card.
    between = 4 * 1.5e-6 + 1.5 * 100 * MB / 25e9
    assert backward_seconds(cluster, AVERAGE, 32, 100 * MB) == pytest.approx(one_node + between)
    alone = Cluster(network, node, 1)
    assert backward_seconds(alone, AVERAGE, 4, MB) == allreduce_seconds(4, MB, network)


def test_an_exchange_sends_less_and_computes_more() -> None:
    scheme = Scheme("made", 0.1, 0.05, calls=2, bucket_seconds=1e-3, seconds_per_byte=1e-9)
    found = backward_seconds(Cluster(LINK), scheme, 4, 100 * MB)
    sent = allreduce_seconds(4, 30 * MB, LINK) + allreduce_seconds(4, 0, LINK)
    assert found == pytest.approx(sent + 1e-3 + 0.1)
    # Two owners of a node share the computations; within a node nothing is compressed.
    node = Link("node", 1e-6, 100e9)
    found = backward_seconds(Cluster(LINK, node, 2), scheme, 8, 100 * MB)
    assert found == pytest.approx(allreduce_seconds(2, 100 * MB, node) + sent + 1e-3 + 0.05)
    assert backward_seconds(Cluster(LINK, node, 2), scheme, 2, MB) == allreduce_seconds(2, MB, node)


BUCKETS = ((100_000_000, 0.06),)
NODE = Link("node", 5e-6, 10e9)
SPENT = allreduce_seconds(2, 100 * MB, NODE)  # by two ranks of a node
WORK = Work("made", 0.03, 0.06, 0.01, BUCKETS, jitter_seconds=0.0, copy_seconds=0.0)


def profile(
    ranks: int, nodes: int, seconds: list[float], links: list[list[Any]], **extra: float
) -> Result:
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
    return seconds_on(Work("none", 0.0, 0.0, 0.0, ((int(nbytes), 0.0),)), ranks, cluster)


def test_computing_while_communicating_is_as_slow_as_every_other_turn_tells() -> None:
    turns = [0.1 + SPENT, 9.0, 0.11 + SPENT, 9.0, 0.12 + SPENT, 9.0]
    base = profile(2, 1, turns, points(Cluster(NODE), 2, [1.0] * 6))
    (steps,) = steps_of(base)
    assert {round(work.compute_seconds, 9) for work in steps.alone} == {0.1}
    assert {round(work.compute_seconds, 9) for work in steps.works} == {0.1, 0.11, 0.12}
    (check,) = check_predictions([base])
    assert list(check.turns) == [9.0] * 3
    assert (check.predicted.low, check.predicted.high) == pytest.approx((0.1 + SPENT, 0.12 + SPENT))
    assert check.turns_inside == 0
    assert check.error == pytest.approx((0.11 + SPENT) / 9 - 1)
    assert check_line([check]).startswith("0 of 1 measured steps, and 0 of 3 of their turns, lie")


def test_times_that_no_link_fits_are_an_error_in_one_line() -> None:
    flat = profile(2, 1, [0.2], [[0, [1.0]], [100 * MB, [0.5]]])
    with pytest.raises(HvdtrainError, match="no link fits the all-reduces of 2 ranks"):
        links_of(flat)
