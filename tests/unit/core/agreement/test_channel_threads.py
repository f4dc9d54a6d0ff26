"""Several threads of one rank on its channel, over an engine in memory that notes mismatches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from meeting_engine import Group, MeetingCommunicator, Referee

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Marker, Operation
from hvdtrain.core.agreement.queue import ChannelObserver, Queue
from hvdtrain.core.agreement.request import LEAVE, Request
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.membership.world import answer_with_zeros
from hvdtrain.types import ReduceOp

# Nothing here takes long, but threads of other tests share the cores.
HANGS_AFTER_SECONDS = 60


def summed(name: str, count: int = 1) -> Allreduce:
    buffer = Buffer.from_array(np.ones(count))
    return Allreduce([buffer], [(count,)], ReduceOp.SUM, name)


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


def close(channels: list[Channel]) -> None:
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
    close(channels)
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
        close(channels)
        assert all(operation.done for operation in late)
        assert referee.faults == []


class _Interrupted(ChannelObserver):
    """Stands for the handler of a signal that raises when an operation has been added."""

    def submitted(self, operation: Operation) -> None:
        raise KeyboardInterrupt

    def proposed(self, operation: Operation) -> None:
        pass

    def agreed(self) -> None:
        pass

    def began(self, operation: Operation) -> None:
        pass

    def ended(self, operation: Operation, error: BaseException | None = None) -> None:
        pass


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
    close(channels)
    assert referee.faults == []


def test_each_of_two_listeners_is_called() -> None:
    _, channels = two_ranks()
    first, second = channels
    stays, goes = threading.Event(), threading.Event()
    first.listen(stays.set)
    first.listen(goes.set)
    first.unlisten(goes.set)
    operation = summed("x")
    second.submit(operation)
    with second.waiting(operation):
        assert stays.wait(HANGS_AFTER_SECONDS)
    assert not goes.is_set()
    first.unlisten(stays.set)
    first.run(summed("x"))
    close(channels)


def test_a_rank_that_waits_after_it_has_left_reports_that_it_has_left() -> None:
    """Others would end the job for one that waits for what they never submit."""
    queue = Queue(2, "[rank 0/2]")

    class LeavesMeanwhile(Marker):
        def leave_and_wait(self) -> None:
            queue.add(Marker(LEAVE))
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
