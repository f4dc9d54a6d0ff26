"""The place of a rank, its device and its threads."""

import math

import pytest

from hvdtrain.topology import (
    RankCores,
    Topology,
    cpu_threads,
    fill_cores,
    format_by_rank,
    format_ranks,
)


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


@pytest.mark.parametrize(
    ("bound", "threads", "limits", "full"),
    [
        (["01", "01"], 1, [math.inf], True),
        (["0123", "0123"], 1, [math.inf], False),
        (["0123", "0123"], 2, [math.inf], True),
        (["0123", "0123"], 1, [2.0], True),
        (["0123", "0123"], 1, [2.5], False),
        (["0123", "0123"], 1, [1.0, 1.0], True),
        (["0123", "0123"], 1, [1.0, math.inf], False),
        (["0", "1", "2"], 1, [math.inf], True),
        (["01", "23"], 1, [math.inf], False),
    ],
)
def test_ranks_fill_the_cores_that_any_of_them_may_use(
    bound: list[str], threads: int, limits: list[float], full: bool
) -> None:
    ranks = [
        RankCores(rank, frozenset(map(int, cores)), threads) for rank, cores in enumerate(bound)
    ]
    assert fill_cores(ranks, dict(zip("ab", limits, strict=False))) is full


def test_messages_list_few_of_hundreds_of_ranks() -> None:
    assert format_ranks([7, 0, 2, 1, 5, 6, 255]) == "ranks 0-2, 5-7, 255"
    assert format_ranks(range(0, 256, 2)) == (
        "ranks 0, 2, 4, 6, 8, 10, 12, 14, and 120 more up to 254"
    )
    assert format_by_rank(["a", "b", *"ab" * 2]) == "ranks 0, 2, 4: a; ranks 1, 3, 5: b"
    assert format_by_rank({3: "a", 5: "a"}) == "ranks 3, 5: a"
    told = format_by_rank([f"{rank} MB" for rank in range(256)])
    assert told.startswith("rank 0: 0 MB; rank 1: 1 MB; ")
    assert told.endswith("rank 7: 7 MB; and 248 more values")
