"""What ranks decide after they have told one another what they ask for."""

import threading
from dataclasses import replace
from typing import Any, cast

from hvdtrain.core.agreement.channel import Channel, FirstUse
from hvdtrain.core.agreement.lifecycle import (
    ChannelState,
    Closed,
    Decision,
    FailAll,
    Failed,
    Phase,
    Refuse,
    Report,
    ReportsExchanged,
    Submitted,
    Voted,
    decide,
    transition,
)
from hvdtrain.core.agreement.operation import JOIN, LEAVE, Request, Work, Zeros
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.types import DType, ReduceOp

SUM = Zeros(((3, DType.FLOAT32),), ReduceOp.SUM)


def reduce(name: str, shape: str = "(3,)") -> Request:
    return Request("allreduce", name, (("shape", shape),), SUM)


def report(*requests: Request, awaited: tuple[Request, ...] = ()) -> Report:
    return Report(requests, frozenset(request.key for request in awaited))


def both(*requests: list[Request], awaited: tuple[Request, ...] = ()) -> Decision:
    """Decide; each rank waits for those of its requests that are awaited."""
    reports = [report(*own, awaited=tuple(r for r in awaited if r in own)) for own in requests]
    return decide(reports, range(len(requests)))


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


def test_a_channel_that_has_lost_ranks_runs_nothing_more_and_says_so() -> None:
    """Also where a call of the engine still ends with a vote: ranks that are left recover."""
    a = reduce("a")
    lost, actions = transition(ChannelState(2), Failed("rank 1 has ended", lost=True))
    assert actions == (FailAll("rank 1 has ended"),)
    for late in (Voted((a,), (a,)), ReportsExchanged((report(a),), (0,), report(a)), Closed()):
        assert transition(lost, late) == (lost, ())
    assert transition(lost, Submitted(a)) == (lost, (Refuse("rank 1 has ended", lost=True),))


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


THREADS = 8


def test_one_thread_settles_what_all_get() -> None:
    first_use, channel = FirstUse(), cast("Channel", threading.Event())  # which is a key here only
    asked: list[int] = []
    results: list[Any] = []
    arrived = threading.Barrier(THREADS)

    def work(number: int) -> None:
        arrived.wait(300)

        def agree() -> int:
            asked.append(number)
            return number

        results.append(first_use.settle(channel, "size", agree))

    threads = [threading.Thread(target=work, args=[number]) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    assert results == asked * THREADS
    assert first_use.find(channel, "size") == asked[0]


def test_a_rank_that_waits_after_it_has_left_reports_that_it_has_left() -> None:
    """Others would end the job for one that waits for what they never submit."""
    queue = Queue(2, "[rank 0/2]")

    class LeavesMeanwhile(Work):
        def leave_and_wait(self) -> None:
            queue.add(Work(LEAVE))
            with queue.waiting(self):
                asked.wait()

        def is_awaited(self, now: float) -> bool:
            leaving.start()
            leaving.join(0.2)  # as long as the report is made, it cannot
            return super().is_awaited(now)

    asked = threading.Event()
    operation = LeavesMeanwhile(Request("barrier", "last"))
    leaving = threading.Thread(target=operation.leave_and_wait)
    queue.add(operation)
    _, report = queue.report()
    asked.set()
    leaving.join(300)
    assert not report.awaited or LEAVE in report.requests
