"""The place of a rank, its device and its threads."""

import pytest

from hvdtrain.topology import Topology, cpu_threads


def place(rank: int, nodes: list[int]) -> Topology:
    return Topology.from_nodes(rank, nodes, [f"host{node}" for node in nodes])


def test_unequal_nodes_in_any_order() -> None:
    nodes = [0, 1, 0, 0, 1]
    places = [place(rank, nodes) for rank in range(5)]
    assert [p.local_rank for p in places] == [0, 0, 1, 2, 1]
    assert [p.local_size for p in places] == [3, 2, 3, 3, 2]
    assert [p.cross_rank for p in places] == [0, 1, 0, 0, 1]
    assert [p.cross_size for p in places] == [2, 2, 2, 1, 2]
    assert places[0].hosts == 2
    assert places[3].title == "[rank 3/5]"


@pytest.mark.parametrize(
    ("ranks", "affinity", "machine", "threads"),
    [(1, 8, 8, 8), (4, 8, 8, 2), (4, 2, 8, 2), (4, 1, 8, 1), (8, 2, 2, 1), (3, 8, 8, 2)],
)
def test_threads(ranks: int, affinity: int, machine: int, threads: int) -> None:
    assert cpu_threads(place(0, [0] * ranks), affinity, machine) == threads
