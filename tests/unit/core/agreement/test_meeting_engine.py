"""The engine in memory by which trials of the channel find mistakes: that it finds them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from meeting_engine import EngineFault, Group, MeetingCommunicator, Referee

from hvdtrain.buffer import Buffer
from hvdtrain.errors import ConnectionLostError
from hvdtrain.types import ReduceOp

Member = Callable[[MeetingCommunicator], object]


def meet(*members: Member, lenient: bool = False, fault: EngineFault | None = None) -> list[str]:
    """Let each member call the engine in a thread of its own; return what is noted."""
    referee = Referee(lenient)
    group = Group(referee, len(members), "test")

    def run(rank: int) -> None:
        communicator = MeetingCommunicator(group, rank, True, fault if rank == 0 else None)
        try:
            members[rank](communicator)
        except ConnectionLostError:
            pass
        finally:
            group.cut_off(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return referee.faults


def vote(communicator: MeetingCommunicator) -> None:
    communicator.start_max(np.zeros(2, np.uint64)).wait()


def reduce(communicator: MeetingCommunicator, count: int = 3) -> None:
    array = np.full(count, communicator.rank + 1.0)
    communicator.allreduce(Buffer.from_array(array), ReduceOp.SUM, prescale=2.0)
    total = communicator.size * (communicator.size + 1)
    assert array.tolist() == [total] * count


def test_members_in_different_primitives() -> None:
    (fault,) = meet(vote, reduce)
    assert "start_max(2)" in fault
    assert "allreduce(" in fault


def test_members_with_different_arguments() -> None:
    (fault,) = meet(reduce, lambda communicator: reduce(communicator, 4))
    assert fault.count("allreduce(") == 2


def test_a_member_that_has_closed_and_is_called_or_missed() -> None:
    def close_and_vote(communicator: MeetingCommunicator) -> None:
        communicator.close()
        vote(communicator)

    (fault,) = meet(close_and_vote)
    assert "start_max after close()" in fault
    (fault,) = meet(vote, MeetingCommunicator.close)
    assert "when [1] had closed" in fault
    assert meet(vote, MeetingCommunicator.close, lenient=True) == []
