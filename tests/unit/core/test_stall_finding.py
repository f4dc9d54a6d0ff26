"""Who waits for whom, from what is pending on each rank."""

from hvdtrain.core.agreement.operation import JOIN, LEAVE, Request
from hvdtrain.core.stall import Wait, compact, describe, find_stalls

SUM = Request("allreduce", "a")


def wait(request: Request, seconds: float | None, ranks: str = "0123", number: int = 0) -> Wait:
    """Make what one rank says; `ranks` are the members of the channel."""
    members = compact(list(map(int, ranks)))
    return Wait((members, number, request.key), request.subject, seconds)


def lines(*waits: list[Wait]) -> list[str]:
    return [describe(stall) for stall in find_stalls(waits, 60)]


def test_ranks_without_the_operation_are_missing() -> None:
    (line,) = lines([wait(SUM, 61)], [], [wait(SUM, 9)], [wait(SUM, 75)])
    assert line == "allreduce 'a' for 75 s: ranks 0, 2, 3 wait for rank 1"
    (line,) = lines([], [], [], [wait(SUM, 60)])
    assert line == "allreduce 'a' for 60 s: rank 3 waits for ranks 0-2"
    assert lines([wait(SUM, 59)], [], [], []) == []


def test_a_rank_in_the_middle_of_it_is_waited_for() -> None:
    (line,) = lines([wait(SUM, 70)], [wait(SUM, None)], [], [wait(SUM, 70)])
    assert line == (
        "allreduce 'a' for 70 s: ranks 0, 3 wait for ranks 1, 2; rank 1 submitted a part of it"
    )
    assert lines(*[[wait(SUM, None)]] * 4) == []


def test_joined_and_left_ranks_are_told_apart() -> None:
    joined, left = [wait(JOIN, 90)], [wait(LEAVE, 90)]
    (line,) = lines([wait(SUM, 70)], joined, left, [])
    assert line == "allreduce 'a' for 70 s: rank 0 waits for rank 3; rank 1 joined; rank 2 left"
    (line,) = lines([wait(SUM, 70)], [wait(SUM, 70)], left, joined)
    assert line == "allreduce 'a' for 70 s: ranks 0, 1 wait; rank 3 joined; rank 2 left"


def test_when_nobody_is_missing_the_last_to_come_counts() -> None:
    others = [[wait(SUM, 100)]] * 3
    assert lines([wait(SUM, 50)], *others) == []
    (line,) = lines([wait(SUM, 60)], *others)
    assert line.startswith("allreduce 'a' for 60 s: ranks 0-3 wait, and nobody is missing")


def test_markers_count_once_and_only_if_nothing_else_is_stalled() -> None:
    left = [wait(LEAVE, 90), wait(LEAVE, 90, number=1), wait(LEAVE, 90, "02")]
    assert lines(left, left, [], []) == ["leave the job for 90 s: ranks 0, 1 wait for ranks 2, 3"]
    (line,) = lines(left, left, [wait(SUM, 70)], [])
    assert line.startswith("allreduce 'a'")


def test_members_at_equal_distances_are_a_range() -> None:
    for ranks in ([3], [0, 1, 2], [1, 3, 5], [2, 1, 0]):
        assert isinstance(compact(ranks), range)
        assert list(compact(ranks)) == ranks
    assert compact([0, 1, 3]) == (0, 1, 3)
