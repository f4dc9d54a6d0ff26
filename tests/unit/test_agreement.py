"""What ranks decide after they have told one another what they want."""

from __future__ import annotations

from hvdtrain.core.agreement import Decision, decide
from hvdtrain.core.request import JOIN, LEAVE, Request, Zeros
from hvdtrain.types import DType, ReduceOp

SUM = Zeros(((3, DType.FLOAT32),), ReduceOp.SUM)


def reduce(name: str, shape: str = "(3,)") -> Request:
    return Request("allreduce", name, (("shape", shape),), SUM)


def gather(name: str) -> Request:
    return Request("allgather", name)


def both(*requests: list[Request]) -> Decision:
    return decide(requests, range(len(requests)))


def test_what_all_have_runs_in_the_first_ranks_order() -> None:
    a, b, c = map(reduce, "abc")
    assert both([a, b, c], [c, a]).run == [a, c]
    assert both([a], [b]) == Decision()


def test_requests_of_one_name_that_differ_fail_on_all() -> None:
    decision = both([reduce("a"), reduce("b")], [reduce("b"), reduce("a", "(4,)")])
    assert decision.run == [reduce("b")]
    (reason,) = decision.failed.values()
    assert "rank 0 sent allreduce 'a' (shape (3,))" in reason
    assert "rank 1 sent allreduce 'a' (shape (4,))" in reason


def test_other_operations_of_one_name_fail_under_each_key() -> None:
    decision = both([reduce("a")], [gather("a")])
    assert set(decision.failed) == {reduce("a").key, gather("a").key}
    assert not both([Request("allreduce")], [Request("allgather")]).failed


def test_one_name_for_two_operations_is_no_conflict() -> None:
    assert both([reduce("a"), gather("a")], [gather("a"), reduce("a")]).run == [
        reduce("a"),
        gather("a"),
    ]


def test_a_joined_rank_counts_as_ready_where_zeros_will_do() -> None:
    assert both([JOIN], [reduce("a")]).run == [reduce("a")]
    failed = both([JOIN], [gather("a")], [gather("a")]).failed
    assert "rank 0 joined" in failed[gather("a").key]
    assert both([JOIN], [reduce("a")], [reduce("b")]).run == []
    assert both([JOIN], [JOIN]).all_joined


def test_what_a_joined_rank_submitted_before_counts() -> None:
    assert both([reduce("a"), gather("b"), JOIN], [gather("b")]).run == [gather("b")]
    failed = both([reduce("a", "(4,)"), JOIN], [reduce("a")], [JOIN]).failed
    assert "rank 0 sent allreduce 'a' (shape (4,)); rank 1 sent" in failed[reduce("a").key]


def test_ranks_that_leave() -> None:
    a = reduce("a")
    assert both([LEAVE], [LEAVE]).run == [LEAVE]
    assert both([a, LEAVE], [a]).run == [a]
    assert "rank 0 left the job while others were in allreduce 'a'" in both([LEAVE], [a]).deserted


def test_ranks_are_named_by_their_numbers_in_the_world() -> None:
    decision = decide([[LEAVE], [reduce("a")]], [4, 7])
    assert decision.deserted.startswith("rank 4 left")
