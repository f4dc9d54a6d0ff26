"""When snapshots in memory are due, and which ranks hold them."""

from __future__ import annotations

import pytest

from hvdtrain.topology import Topology
from hvdtrain.train.loop.snapshots import SNAPSHOT, Snapshots, second_holder
from hvdtrain.train.options import TrainOptions


def test_one_waits_until_it_is_taken() -> None:
    snapshots = Snapshots.of(TrainOptions(elastic_snapshot="3 steps"))
    due = [snapshots.due(step, None, set(), 2) for step in range(1, 6)]
    assert due == [False, False, True, True, True]
    assert snapshots.timers == {}


def test_one_rank_alone_needs_none() -> None:
    snapshots = Snapshots.of(TrainOptions(elastic_snapshot="1 step"))
    assert not snapshots.due(1, None, set(), 1)


def test_epochs_are_counted_when_they_end() -> None:
    snapshots = Snapshots.of(TrainOptions(elastic_snapshot="2 epochs"))
    assert not snapshots.due(18, None, set(), 2)
    assert not snapshots.due(9, 1, set(), 2)
    assert snapshots.due(18, 2, set(), 2)


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (None, "taken as often as takes 1% of the time"),
        ("2 minutes", "taken every 120 seconds"),
    ],
)
def test_the_first_is_due_at_once_by_the_clock(every: str | None, text: str) -> None:
    snapshots = Snapshots.of(TrainOptions(elastic_snapshot=every))
    assert snapshots.timers == {SNAPSHOT: 0.0}
    assert not snapshots.due(1, None, set(), 2)
    assert snapshots.due(1, None, {SNAPSHOT}, 2)
    assert snapshots.text.endswith(text)


def test_they_take_a_hundredth_of_the_time() -> None:
    snapshots = Snapshots.of(TrainOptions())
    assert snapshots.seconds_to_next(0.5) == pytest.approx(50)
    assert snapshots.seconds_to_next(0.001) == 5
    assert Snapshots.of(TrainOptions(elastic_snapshot="1 hour")).seconds_to_next(90) == 3600


@pytest.mark.parametrize(
    ("hosts", "leaving", "holder"),
    [
        ("aabb", (), 2),
        ("aabb", (2,), 3),
        ("aabb", (2, 3), 1),
        ("aaa", (), 1),
        ("aaa", (1, 2), 0),
        ("a", (), 0),
    ],
)
def test_the_second_holder_is_on_another_host(
    hosts: str, leaving: tuple[int, ...], holder: int
) -> None:
    topology = Topology.from_nodes(0, [0] * len(hosts), list(hosts))
    assert second_holder(topology, leaving) == holder
