"""Channels: in several threads, interrupted, and the reports of ranks."""

import threading
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pytest
from meeting_engine import Group, MeetingCommunicator, Referee

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.driver import ReportExchange
from hvdtrain.core.agreement.lifecycle import Report
from hvdtrain.core.agreement.operation import LEAVE, Operation, Request, Work
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.membership import answer_with_zeros
from hvdtrain.types import ReduceOp

# A limit that only ends a hang.
HANGS_AFTER_SECONDS = 300


def summed(name: str, count: int = 1) -> Allreduce:
    return Allreduce([Buffer.from_array(np.ones(count))], [(count,)], ReduceOp.SUM, name)


def two_ranks(has_threads: bool = True) -> tuple[Referee, list[Channel]]:
    referee = Referee()
    group = Group(referee, 2, "world")
    return referee, [
        Channel(
            MeetingCommunicator(group, rank, has_threads),
            range(2),
            f"[rank {rank}/2]",
            answer_with_zeros,
            "world",
        )
        for rank in range(2)
    ]


def together(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_AFTER_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def leave_all(channels: list[Channel]) -> None:
    together(*(lambda c=c: c.wait(c.leave()) for c in channels))
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("has_threads", [True, False])
def test_a_thread_is_not_kept_by_another_that_drives(has_threads: bool) -> None:
    referee, channels = two_ranks(has_threads)
    first, second = channels

    def in_turn(channel: Channel, *names: str) -> None:
        for name in names:
            channel.run(summed(name))

    together(
        lambda: in_turn(first, "x"),
        lambda: in_turn(first, "y", "z"),
        lambda: in_turn(second, "y", "z", "x"),
    )
    leave_all(channels)
    assert referee.faults == []


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_submitted_while_a_rank_joins_is_not_lost(count: int) -> None:
    """The rank answers the others with zeros, under the very names that it submits meanwhile."""
    for _ in range(10):
        referee, channels = two_ranks()
        joining, other = channels
        late = [summed(f"x{number}", count) for number in range(20)]
        joined = joining.join()

        def work(other: Channel = other) -> None:
            for number in range(20):
                operation = summed(f"x{number}")
                other.submit(operation)
                with other.waiting(operation):
                    while not operation.done:
                        other.poll(operation)
            other.wait(other.join())

        def submit(joining: Channel = joining, late: list[Allreduce] = late) -> None:
            for one in late:
                joining.submit(one, at_once=True)

        together(work, submit)
        joining.wait(joined)
        leave_all(channels)
        assert all(operation.done for operation in late)
        assert referee.faults == []


class _Interrupted:
    """Stands for the handler of a signal that raises when an operation has been added."""

    def submitted(self, operation: Operation) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_operation_is_run_whose_submission_is_interrupted(ahead: int) -> None:
    referee, channels = two_ranks()
    first, second = channels
    for number in range(ahead):
        first.submit(summed(f"ahead {number}"))
    first.queue.track = _Interrupted()
    with pytest.raises(KeyboardInterrupt):
        first.submit(summed("x"))
    first.queue.track = None
    for name in ["x", *(f"ahead {number}" for number in range(ahead))]:
        together(partial(second.run, summed(name)))
    leave_all(channels)
    assert referee.faults == []


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
    leaving.join(HANGS_AFTER_SECONDS)
    assert not report.awaited or LEAVE in report.requests


def report(numbers: Iterable[int], prefix: str = "x", joined_seconds: float = 0.0) -> Report:
    requests = [Request("allreduce", f"{prefix} {n}", (("shape", str(n)),)) for n in numbers]
    awaited = frozenset(request.key for request in requests[::2])
    return Report(tuple(requests), awaited, joined_seconds)


class Ranks:
    def __init__(self, size: int) -> None:
        self._referee = Referee()
        group = Group(self._referee, size, "world")
        self._ways = [ReportExchange(MeetingCommunicator(group, r, True)) for r in range(size)]

    def exchange(self, own: list[Report]) -> list[tuple[Report, ...]]:
        received: dict[int, tuple[Report, ...]] = {}

        def run(rank: int) -> None:
            received[rank] = self._ways[rank](own[rank])

        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(own))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_AFTER_SECONDS)
        assert self._referee.faults == []
        return [received[rank] for rank in range(len(own))]


# The last does not fit into the first block, even if all of its requests have numbers.
@pytest.mark.parametrize("count", [0, 1, 2, 50, 300])
def test_requests_that_overlap_are_the_same_everywhere(count: int) -> None:
    ranks = Ranks(3)
    for shift in (0, 0, 1, 2):
        own = [report(range(r * shift, count + r), joined_seconds=r / 3) for r in range(3)]
        for received in ranks.exchange(own):
            assert list(received) == own
            requests = {request.key: request for theirs in received for request in theirs.requests}
            assert all(requests[q.key] is q for theirs in received for q in theirs.requests)


def test_names_that_change_do_not_fill_the_memory() -> None:
    ranks = Ranks(2)
    for step in range(6):
        own = [report(range(1000), f"step {step}"), report(range(500, 1500), f"step {step}")]
        assert all(list(received) == own for received in ranks.exchange(own))
    assert len(ranks._ways[0]._requests) < 6 * 1500
