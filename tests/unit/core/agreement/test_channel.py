"""Channels: idle, in several threads, abandoned because ranks are lost, and their reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from meeting_engine import Group, MeetingCommunicator, Referee

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.decision import Report
from hvdtrain.core.agreement.driver import ReportExchange
from hvdtrain.core.agreement.operation import Marker, Operation
from hvdtrain.core.agreement.queue import ChannelObserver, Queue
from hvdtrain.core.agreement.request import LEAVE, Request
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.exchanges import allreduce
from hvdtrain.core.gradients.reducer import step_request
from hvdtrain.core.gradients.step import GradientStep
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.core.membership.world import answer_with_zeros
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.local import LocalCommunicator, _Done
from hvdtrain.errors import ConnectionLostError, RanksLostError
from hvdtrain.types import ReduceOp

# A limit that only ends a hang.
HANGS_AFTER_SECONDS = 300


class CountingCommunicator(LocalCommunicator):
    """A communicator of one that may be used by a thread, and counts its rounds."""

    capabilities = replace(LocalCommunicator.capabilities, concurrent=True)
    rounds = 0

    def start_max(self, values: npt.NDArray[np.uint64]) -> _Done:
        self.rounds += 1
        return super().start_max(values)


def _step(buckets: list[Buffer], op: ReduceOp) -> GradientStep:
    exchange = allreduce.AllreduceExchange(op)
    step = GradientStep(buckets, Buffer.from_array(np.ones(1, np.int32)), exchange)
    return step.submitted_with(step_request("plan", "digest", buckets, 1, exchange), OwnStep())


def test_a_program_goes_on_only_when_it_may_submit_the_next_step() -> None:
    channel = Channel(CountingCommunicator(), [0], "[rank 0/1]", answer_with_zeros, "plan")
    step = _step([], ReduceOp.AVERAGE)
    step.added.add_done_callback(lambda _: under_way.append(len(channel.queue) > 0))
    under_way: list[bool] = []
    channel.run(step)
    assert under_way == [False]
    channel.close()


def test_a_channel_that_is_closed_in_the_middle_of_a_step() -> None:
    channel = Channel(CountingCommunicator(), [0], "[rank 0/1]", answer_with_zeros, "plan")
    buckets = [Buffer.from_array(np.full(2, 3.0)) for _ in range(3)]
    step = _step(buckets, ReduceOp.SUM)
    channel.submit(step, at_once=True)
    step.launch()
    step.reduced[0].result()
    waiting = threading.Thread(target=channel.wait, args=[step], daemon=True)
    closing = threading.Thread(target=channel.close, daemon=True)
    for thread in (waiting, closing):
        thread.start()
    for thread in (waiting, closing):
        thread.join(HANGS_AFTER_SECONDS)
        assert not thread.is_alive()
    assert step.outcome() is None
    assert [bucket.array().tolist() for bucket in buckets] == [[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]


def test_all_count_from_the_same_number_when_all_have_joined() -> None:
    channel = Channel(CountingCommunicator(), [0], "[rank 0/1]", answer_with_zeros, "world")
    assert [channel.count("step"), channel.count("step"), channel.counted("step")] == [1, 2, 2]
    assert channel.wait(channel.join()).ranks == (0,)
    assert channel.counted("step") == 0
    channel.close()


def test_what_was_made_beside_a_communicator_is_given_back_before_it() -> None:
    order: list[str] = []

    class Closing(CountingCommunicator):
        def close(self) -> None:
            order.append("communicator")
            super().close()

    channel = Channel(Closing(), [0], "[rank 0/1]", answer_with_zeros, "world")
    channel.before_closing(lambda: order.append("node"))
    channel.before_closing(lambda: order.append("network"))
    channel.close()
    assert order == ["node", "network", "communicator"]


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
    leave_all(channels)
    assert referee.faults == []


def test_each_of_two_listeners_is_called() -> None:
    _, channels = two_ranks()
    first, second = channels
    told, stays, goes = threading.Event(), list[Sequence[int]](), list[Sequence[int]]()
    for listener in (stays.append, goes.append, lambda _: told.set()):
        first.listen(listener)
    first.unlisten(goes.append)
    operation = summed("x")
    second.submit(operation)
    with second.waiting(operation):
        assert told.wait(HANGS_AFTER_SECONDS)
    assert (stays[0], goes) == ((1,), [])
    first.queue.listeners.clear()
    first.run(summed("x"))
    leave_all(channels)


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


TWO = 2
LOST = RanksLostError("[rank 0/2] rank 1 ended", (1,))


class Surviving(MeetingCommunicator):
    """A communicator whose errors mean that ranks are lost."""

    def explained(self, error: BaseException) -> BaseException:
        return LOST if isinstance(error, ConnectionLostError) else error


class Filled(Operation):
    """An operation that needs the program to fill a buffer, as a step's buckets."""

    def __init__(self) -> None:
        self.request = Request("step", "filled")
        self.began, self.filled = threading.Event(), threading.Event()

    def abandon(self) -> None:
        self.filled.set()

    def execute(self, communicator: Communicator) -> None:
        self.began.set()
        self.filled.wait()
        communicator.allreduce(Buffer.from_array(np.ones(1)), ReduceOp.SUM)


class Pair:
    """The channels of two ranks, of which the second can be lost."""

    def __init__(self, with_threads: bool) -> None:
        self._referee = Referee(lenient=True)
        self._group = Group(self._referee, TWO, "world")
        self.channels = [self._channel(rank, with_threads) for rank in range(TWO)]
        self.revoked = 0

    def _channel(self, rank: int, with_threads: bool) -> Channel:
        communicator = Surviving(self._group, rank, with_threads)
        title = f"[rank {rank}/{TWO}]"
        return Channel(
            communicator, range(TWO), title, answer_with_zeros, "world", lost=self._revoke
        )

    def _revoke(self) -> None:
        self.revoked += 1

    def lose_rank_1(self) -> None:
        """Have all calls fail, as when a rank is lost and another one has noticed it."""
        for rank in range(TWO):
            self._group.cut_off(rank)

    def close(self) -> None:
        """End the threads, and see that nobody has done anything wrong."""
        self.lose_rank_1()
        for channel in self.channels:
            abandon(channel)
        assert not self._referee.faults


@pytest.fixture(params=[True, False], ids=["threads", "no threads"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def abandon(channel: Channel) -> None:
    """Abandon a channel, and fail if that takes for ever."""
    thread = threading.Thread(target=channel.abandon, args=(LOST,), daemon=True)
    thread.start()
    thread.join(HANGS_AFTER_SECONDS)
    assert not thread.is_alive(), "a channel is not abandoned"


def see_that_it_is_over(channel: Channel, *operations: Operation) -> None:
    assert not channel.pending()
    for operation in operations:
        assert operation.done
        with pytest.raises(RanksLostError, match="rank 1 ended"):
            operation.outcome()
    with pytest.raises(RanksLostError, match=r"'later': .*rank 1 ended"):
        channel.submit(Marker(Request("mark", "later")))
    for mark in (channel.leave, channel.join):
        with pytest.raises(RanksLostError, match="rank 1 ended"):
            mark()


def test_what_is_pending_fails(pair: Pair) -> None:
    channel, operations = pair.channels[0], [Marker(Request("mark", name)) for name in "ab"]
    for operation in operations:
        channel.submit(operation)
    pair.lose_rank_1()
    abandon(channel)
    see_that_it_is_over(channel, *operations)


def test_an_idle_channel_accepts_nothing(pair: Pair) -> None:
    abandon(pair.channels[0])
    see_that_it_is_over(pair.channels[0])
    assert not pair.revoked


def test_a_wait_ends_and_has_calls_of_others_fail(pair: Pair) -> None:
    channel, operation = pair.channels[0], Marker(Request("mark", "a"))
    channel.submit(operation)
    pair.lose_rank_1()
    with pytest.raises(RanksLostError):
        channel.wait(operation)
    assert pair.revoked == 1
    abandon(channel)
    see_that_it_is_over(channel, operation)


def test_an_operation_that_waits_for_its_program_ends() -> None:
    pair, operations = Pair(with_threads=True), [Filled() for _ in range(TWO)]
    for channel, operation in zip(pair.channels, operations, strict=True):
        channel.submit(operation)
    for operation in operations:
        assert operation.began.wait(HANGS_AFTER_SECONDS)
    pair.lose_rank_1()
    for channel, operation in zip(pair.channels, operations, strict=True):
        abandon(channel)
        see_that_it_is_over(channel, operation)
    pair.close()


def report(numbers: Iterable[int], prefix: str = "x", joined_seconds: float = 0.0) -> Report:
    requests = [Request("allreduce", f"{prefix} {n}", (("shape", str(n)),)) for n in numbers]
    awaited = frozenset(request.key for request in requests[::2])
    return Report(tuple(requests), awaited, joined_seconds)


class Ranks:
    """Ranks that exchange reports."""

    def __init__(self, size: int) -> None:
        self._referee = Referee()
        group = Group(self._referee, size, "world")
        self._ways = [ReportExchange(MeetingCommunicator(group, r, True)) for r in range(size)]

    def exchange(self, own: list[Report]) -> list[tuple[Report, ...]]:
        """Exchange a report of each rank; return what each rank received."""
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
