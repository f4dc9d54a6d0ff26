"""A channel that is abandoned because ranks are lost: what the exploration takes for granted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from meeting_engine import Group, MeetingCommunicator, Referee

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Marker, Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.membership.world import answer_with_zeros
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import ConnectionLostError, RanksLostError
from hvdtrain.types import ReduceOp

SIZE = 2
LOST = RanksLostError("[rank 0/2] rank 1 ended", (1,))
# Nothing here takes long, but threads of other tests share the cores.
HANGS_AFTER_SECONDS = 60


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
        self._group = Group(self._referee, SIZE, "world")
        self.channels = [self._channel(rank, with_threads) for rank in range(SIZE)]
        self.revoked = 0

    def _channel(self, rank: int, with_threads: bool) -> Channel:
        communicator = Surviving(self._group, rank, with_threads)
        title = f"[rank {rank}/{SIZE}]"
        return Channel(
            communicator, range(SIZE), title, answer_with_zeros, "world", lost=self._revoke
        )

    def _revoke(self) -> None:
        self.revoked += 1

    def lose_rank_1(self) -> None:
        """Have all calls fail, as when a rank is lost and another one has noticed it."""
        for rank in range(SIZE):
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
    pair, operations = Pair(with_threads=True), [Filled() for _ in range(SIZE)]
    for channel, operation in zip(pair.channels, operations, strict=True):
        channel.submit(operation)
    for operation in operations:
        assert operation.began.wait(HANGS_AFTER_SECONDS)
    pair.lose_rank_1()
    for channel, operation in zip(pair.channels, operations, strict=True):
        abandon(channel)
        see_that_it_is_over(channel, operation)
    pair.close()
