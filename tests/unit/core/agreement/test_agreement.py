"""What ranks decide after they have told one another what they ask for."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from hvdtrain.core.agreement.channel import Channel, FirstUse
from hvdtrain.core.agreement.decision import (
    ChannelState,
    Decision,
    Ending,
    EndJoin,
    FailAll,
    JoinOrder,
    Phase,
    Refuse,
    Report,
    ReportsExchanged,
    RunRequests,
    Submitted,
    decide,
    last_to_join,
)
from hvdtrain.core.agreement.lifecycle import transition
from hvdtrain.core.agreement.queue import NEVER, NOW, Alarm, after
from hvdtrain.core.agreement.request import JOIN, LEAVE, Request, Zeros
from hvdtrain.types import DType, ReduceOp

SUM = Zeros(((3, DType.FLOAT32),), ReduceOp.SUM)


def reduce(name: str, shape: str = "(3,)") -> Request:
    return Request("allreduce", name, (("shape", shape),), SUM)


def gather(name: str) -> Request:
    return Request("allgather", name)


def report(*requests: Request, awaited: tuple[Request, ...] = ()) -> Report:
    return Report(requests, frozenset(request.key for request in awaited))


def both(*requests: list[Request], awaited: tuple[Request, ...] = ()) -> Decision:
    """Decide; each rank waits for those of its requests that are awaited."""
    reports = [report(*own, awaited=tuple(r for r in awaited if r in own)) for own in requests]
    return decide(reports, range(len(requests)))


def run(*requests: list[Request]) -> list[Request]:
    return list(both(*requests).run)


def test_what_all_have_runs_in_the_first_ranks_order() -> None:
    a, b, c = map(reduce, "abc")
    assert run([a, b, c], [c, a]) == [a, c]
    assert both([a], [b]) == Decision()


def test_requests_of_one_name_that_differ_fail_on_all() -> None:
    decision = both([reduce("a"), reduce("b")], [reduce("b"), reduce("a", "(4,)")])
    assert list(decision.run) == [reduce("b")]
    (reason,) = decision.mismatched.values()
    assert "rank 0 sent allreduce 'a' (shape (3,))" in reason
    assert "rank 1 sent allreduce 'a' (shape (4,))" in reason


def test_other_operations_of_one_name_fail_under_each_key() -> None:
    decision = both([reduce("a")], [gather("a")])
    assert set(decision.mismatched) == {reduce("a").key, gather("a").key}
    assert not both([Request("allreduce")], [Request("allgather")]).mismatched


def test_one_name_for_two_operations_is_no_conflict() -> None:
    ordered = [reduce("a"), gather("a")]
    assert run(ordered, ordered[::-1]) == ordered
    assert run([*ordered, JOIN], [gather("a"), JOIN]) == ordered  # zeros for the reduction


def test_a_joined_rank_counts_as_ready_where_zeros_will_do() -> None:
    assert run([JOIN], [reduce("a")]) == [reduce("a")]
    failed = both([JOIN], [gather("a")], [gather("a")]).mismatched
    assert "rank 0 joined" in failed[gather("a").key]
    assert run([JOIN], [reduce("a")], [reduce("b")]) == []
    assert both([JOIN], [JOIN]).ending is Ending.JOIN


def test_what_a_joined_rank_submitted_before_counts() -> None:
    assert run([reduce("a"), gather("b"), JOIN], [gather("b")]) == [gather("b")]
    failed = both([reduce("a", "(4,)"), JOIN], [reduce("a")], [JOIN]).mismatched
    assert "rank 0 sent allreduce 'a' (shape (4,)); rank 1 sent" in failed[reduce("a").key]


def test_what_is_left_when_all_have_joined_runs_with_zeros_or_fails() -> None:
    decision = both([reduce("a"), JOIN], [gather("b"), JOIN], [JOIN])
    assert list(decision.run) == [reduce("a")]
    assert "ranks 0, 2 joined" in decision.mismatched[gather("b").key]
    assert decision.ending is Ending.JOIN


def test_ranks_that_leave() -> None:
    a = reduce("a")
    assert both([LEAVE], [LEAVE]).ending is Ending.LEAVE
    assert run([a, LEAVE], [a]) == [a]
    deserted = both([LEAVE], [a], awaited=(a,)).deserted
    assert "rank 0 left the job while others were in allreduce 'a'" in deserted


def test_a_rank_is_deserted_only_in_what_it_waits_for() -> None:
    a, b = reduce("a"), reduce("b")
    assert both([LEAVE], [a]) == Decision()  # which may leave as well
    assert both([LEAVE], [a, b], awaited=(b,)).deserted.count("allreduce") == 1
    assert not both([a, LEAVE], [a], [b], awaited=(a,)).deserted  # rank 2 may come to it
    assert both([LEAVE], [JOIN], awaited=(JOIN,)).deserted
    assert not both([LEAVE], [a, LEAVE], awaited=(a,)).deserted


def test_what_failed_on_others_because_a_rank_left_fails_when_it_comes() -> None:
    a, b = reduce("a"), reduce("b")
    reports = report(LEAVE), report(a, awaited=(a,)), report()
    states = []
    for own in reports:
        event = ReportsExchanged(reports, (0, 1, 2), own)
        phase = Phase.LEAVING if own is reports[0] else Phase.OPEN
        state, actions = transition(ChannelState(3, phase), event)
        assert [type(action) for action in actions] == [FailAll]
        states.append(state)
    for state in states[:2]:
        assert transition(state, Submitted(a)) == (state, ())
    late = states[2]
    assert transition(late, Submitted(b)) == (late, ())
    told, (refusal,) = transition(late, Submitted(a))
    assert isinstance(refusal, Refuse)
    assert refusal.deserted
    assert refusal.reason.startswith("rank 0 left the job while others were in")
    assert transition(told, Submitted(a)) == (told, ())


def test_what_is_left_when_all_leave_fails_with_the_ranks_that_never_came() -> None:
    a, b, c = map(reduce, "abc")
    decision = both([a, b, LEAVE], [b, c, LEAVE], [b, c, LEAVE])
    assert decision.ending is Ending.LEAVE
    assert list(decision.run) == [b]
    assert set(decision.unmet) == {a.key, c.key}
    assert decision.unmet[a.key].startswith("ranks 1, 2 left without it")
    assert decision.unmet[c.key].startswith("rank 0 left without it")


def test_the_rank_that_joined_last_is_known() -> None:
    a = reduce("a")
    state = ChannelState(size=3, phase=Phase.JOINING)
    ranks, first = (4, 5, 6), (report(JOIN), report(a), report(a))
    state, actions = transition(state, ReportsExchanged(first, ranks, first[0]))
    assert state.behind == {0}
    assert actions == (RunRequests((a,)),)
    second = tuple(Report((JOIN,), joined_seconds=seconds) for seconds in (1.0, 3.0, 2.0))
    after, actions = transition(state, ReportsExchanged(second, ranks, second[0]))
    order = JoinOrder(ranks, (1.0, 3.0, 2.0), frozenset({4}))
    assert (after, actions[-1]) == (ChannelState(3), EndJoin(order))
    assert last_to_join([order]) == 6


def test_a_rank_that_missed_an_operation_is_not_the_last() -> None:
    a, b = map(reduce, "ab")
    assert both([JOIN], [a], awaited=(a,)).behind == {0}
    assert both([a, JOIN], [a]).behind == frozenset()  # it submitted it itself
    assert both([JOIN], []).behind == frozenset()  # nothing runs
    assert both([a, JOIN], [b]).behind == {0}  # b does, with zeros of rank 0
    assert both([a, JOIN], [JOIN]).behind == {1}
    assert both([JOIN], [replace(a, zeros=None)]).behind == {0}  # what fails counts, too
    other = reduce("a", "(4,)")
    assert both([a, JOIN], [other, JOIN], [JOIN]).behind == {2}  # two tried it


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ([[], []], 2),
        ([[2], []], 3),
        ([[], [2, 3]], 1),
        ([[3], [2]], 1),
        ([[1, 2], [3]], 2),  # each missed what the others took part in: the times are left
    ],
)
def test_what_one_channel_knows_counts_for_all(missed: list[list[int]], expected: int) -> None:
    orders = [JoinOrder((1, 2, 3), (3.0, 1.0, 2.0), frozenset(behind)) for behind in missed]
    assert last_to_join(orders) == expected


def test_ranks_are_named_by_their_numbers_in_the_world() -> None:
    a = reduce("a")
    decision = decide([report(LEAVE), report(a, awaited=(a,))], [4, 7])
    assert decision.deserted.startswith("rank 4 left")


THREADS = 8


class _Key:
    """Stands for a channel, which is a key here only."""


def _in_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=[number]) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_thread_settles_what_all_get() -> None:
    first_use, channel = FirstUse(), cast("Channel", _Key())
    asked: list[int] = []
    results: list[Any] = []
    arrived = threading.Barrier(THREADS)

    def work(number: int) -> None:
        arrived.wait(300)

        def agree() -> int:
            asked.append(number)
            return number

        results.append(first_use.settle(channel, "size", agree))

    _in_threads(work)
    assert len(asked) == 1
    assert results == asked * THREADS
    assert first_use.find(channel, "size") == asked[0]


def test_each_thread_tries_again_after_an_error() -> None:
    first_use, channel = FirstUse(), cast("Channel", _Key())
    failed: list[int] = []
    arrived = threading.Barrier(THREADS)

    def refuse() -> None:
        raise ValueError("a rank has joined")

    def work(number: int) -> None:
        arrived.wait(300)
        try:
            first_use.settle(channel, "size", refuse)
        except ValueError:
            failed.append(number)

    _in_threads(work)
    assert sorted(failed) == list(range(THREADS))
    assert first_use.settle(channel, "size", lambda: 3) == 3
    assert first_use.settle(channel, "size", lambda: pytest.fail("asked twice")) == 3


def test_a_closed_alarm_leaves_no_file_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    alarm = Alarm()
    alarm.close()
    alarm.set(NOW)
    # Meanwhile what others have left may be collected, with its files: there are no more than then.
    assert set(os.listdir("/proc/self/fd")) <= before


def test_without_files_each_time_is_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        alarm = Alarm()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    thread = threading.Thread(target=alarm.wait)
    thread.start()
    alarm.set(NEVER)
    alarm.set(after(3600.0))
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_that_waits_is_woken() -> None:
    alarm = Alarm()
    thread = threading.Thread(target=alarm.wait)
    thread.start()
    alarm.set(after(3600.0))
    alarm.set(NOW)
    thread.join(60)
    assert not thread.is_alive()
