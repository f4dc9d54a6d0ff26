"""Channels: in several threads, interrupted, and the reports of ranks."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.driver import ReportExchange
from hvdtrain.core.agreement.lifecycle import Report
from hvdtrain.core.agreement.operation import LEAVE, Operation, Request, Work
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.core.allreduce import Allreduce
from hvdtrain.core.membership import answer_with_zeros
from hvdtrain.engines.communicator import Pending
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.types import ReduceOp

# A limit that only ends a hang.
HANGS_AFTER_SECONDS = 300


@dataclass
class Meeting:
    """The calls of all members that belong together: what must be equal in them, and the rest."""

    kind: tuple[object, ...]
    calls: dict[int, tuple[Any, ...]] = field(default_factory=dict)


class Group:
    """An engine for threads: the n-th calls of all members must be the same."""

    def __init__(self, size: int) -> None:
        self.size, self.news = size, threading.Condition()
        self.faults: list[str] = []
        self._entered = [0] * size
        self._meetings: dict[int, Meeting] = {}
        self._users: dict[int, int] = {}

    def enter(self, rank: int, kind: tuple[object, ...], *own: Any) -> Meeting:
        """Make a member's next call, which others wait for; the last one does the work."""
        with self.news:
            meeting = self._meetings.setdefault(self._entered[rank], Meeting(kind))
            if meeting.kind != kind:
                self.faults.append(f"rank {rank}: {kind} where others are in {meeting.kind}")
            meeting.calls[rank] = own
            if len(meeting.calls) == self.size:
                del self._meetings[self._entered[rank]]
                combine(kind[0], [meeting.calls[other] for other in range(self.size)])
                self.news.notify_all()
            self._entered[rank] += 1
            return meeting

    def leave(self, rank: int, meeting: Meeting) -> None:
        """Block until all members have made the call; the other threads of this one must not."""
        with self.news:
            if self._users.setdefault(rank, threading.get_ident()) != threading.get_ident():
                self.faults.append(f"rank {rank}: {meeting.kind} beside another thread's call")
            while not self.has_met(meeting):
                assert self.news.wait(HANGS_AFTER_SECONDS), (rank, meeting.kind)
            self._users.pop(rank, None)

    def has_met(self, meeting: Meeting) -> bool:
        return len(meeting.calls) == self.size


def combine(primitive: object, calls: Sequence[tuple[Any, ...]]) -> None:
    match primitive:
        case "start_max":
            highest = np.maximum.reduce([values for (values,) in calls])
            for (values,) in calls:
                values[:] = highest
        case "allreduce":
            total = sum(buffer.array() * scale for buffer, scale in calls)
            for buffer, _ in calls:
                buffer.array()[:] = total
        case "allgather":
            content = np.concatenate([send.array() for send, _ in calls])
            for _, receive in calls:
                receive.array()[:] = content


class Started(Pending):
    def __init__(self, communicator: "MeetingCommunicator", meeting: Meeting) -> None:
        self._communicator, self._meeting = communicator, meeting

    def test(self) -> bool:
        return self._communicator.group.has_met(self._meeting)

    def wait(self) -> None:
        self._communicator.group.leave(self._communicator.rank, self._meeting)


class MeetingCommunicator(LocalCommunicator):
    def __init__(self, group: Group, rank: int, concurrent: bool) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.capabilities = replace(LocalCommunicator.capabilities, concurrent=concurrent)

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        return Started(self, self.group.enter(self.rank, ("start_max", values.size), values))

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        kind = ("allreduce", op, postscale, buffer.dtype, buffer.count)
        self.group.leave(self.rank, self.group.enter(self.rank, kind, buffer, prescale))
        buffer.scale(postscale)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        kind = ("allgather", tuple(counts), send.dtype)
        self.group.leave(self.rank, self.group.enter(self.rank, kind, send, receive))


def summed(name: str, count: int = 1) -> Allreduce:
    return Allreduce([Buffer.from_array(np.ones(count))], [(count,)], ReduceOp.SUM, name)


def two_ranks(has_threads: bool = True) -> tuple[Group, list[Channel]]:
    group = Group(2)
    return group, [
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
    group, channels = two_ranks(has_threads)
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
    assert group.faults == []


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_submitted_while_a_rank_joins_is_not_lost(count: int) -> None:
    """The rank answers the others with zeros, under the very names that it submits meanwhile."""
    for _ in range(10):
        group, channels = two_ranks()
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
        assert group.faults == []


class _Interrupted:
    """Stands for the handler of a signal that raises when an operation has been added."""

    def submitted(self, operation: Operation) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_operation_is_run_whose_submission_is_interrupted(ahead: int) -> None:
    group, channels = two_ranks()
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
    assert group.faults == []


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
        self._group = Group(size)
        members = [MeetingCommunicator(self._group, rank, True) for rank in range(size)]
        self._ways = list(map(ReportExchange, members))

    def exchange(self, own: list[Report]) -> list[tuple[Report, ...]]:
        received: dict[int, tuple[Report, ...]] = {}

        def run(rank: int) -> None:
            received[rank] = self._ways[rank](own[rank])

        together(*(partial(run, rank) for rank in range(len(own))))
        assert self._group.faults == []
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
