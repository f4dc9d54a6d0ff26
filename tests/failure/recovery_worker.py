"""Ranks of which some are killed in the middle of a program, while the others go on."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.context import recover
from hvdtrain.engines.communicator import poll_until
from hvdtrain.errors import RanksLostError

ENOUGH_SECONDS = 0.05
# More than is staged at once, and enough for the slices of a hierarchy.
ELEMENTS = 400_000
# The test waits 300 s: if ranks hang, it shows where.
HANGS_SECONDS = 240


class Program:
    def __init__(self) -> None:
        hvd.init()
        self.own, self.left = hvd.rank(), list(range(hvd.size()))
        self.sets = {ranks: hvd.add_process_set(list(ranks)) for ranks in ((0, 3), (1, 2, 3))}
        self._processes = hvd.allgather_object(os.getpid())

    def go_on_without(
        self,
        victims: Sequence[int],
        call: Callable[[], object],
        then: int | None = None,
        stopped: int | None = None,
    ) -> None:
        """Have ranks be killed while the others call something, and one more during recover().

        One may be stopped meanwhile, for which others wait until they notice; those after it are on
        its host.
        """
        expected = [rank for rank in self.left if rank not in (*victims, then)]
        if self.own in victims and call is open_and_close:
            # Open MPI 5.0.11 crashes if it hears of an end while it makes a communicator.
            call()
            be_killed()
        if self.own in victims:
            other = () if stopped is None else (self._processes[stopped],)
            threading.Timer(ENOUGH_SECONDS, be_killed, other).start()
        while self.left != expected:
            poll_until(lambda: ends_with_loss(call))
            if stopped is not None and self.own > stopped:
                os.kill(self._processes[stopped], signal.SIGCONT)
            self._see_that_all_fails()
            if self.own == then:  # within MPI_Comm_shrink Open MPI 5.0.11 may crash
                be_killed()
            recovery = recover()
            lost = [self.left[rank] for rank in recovery.lost]
            assert lost
            assert set(lost) <= {*victims, then}
            assert recovery.size_before - len(lost) == recovery.size
            self.left = [rank for rank in self.left if rank not in lost]
        self.check()

    def _see_that_all_fails(self) -> None:
        assert ends_with_loss(reduce)
        for process_set in self.sets.values():
            if process_set.included():
                assert ends_with_loss(partial(hvd.barrier, process_set=process_set))

    def check(self) -> None:
        assert [hvd.rank(), hvd.size()] == [self.left.index(self.own), len(self.left)]
        assert hvd.allgather_object(self.own) == self.left
        failures = context.current().failures
        assert failures is not None
        failures.check()
        assert failures.agree(True)
        assert not failures.agree(hvd.rank() > 0)
        summed = hvd.allreduce(torch.full([ELEMENTS], float(self.own)), op=hvd.Sum, name="sum")
        assert (summed == sum(self.left)).all()
        # Where the program waits counts as waiting, whatever the process set.
        here = context.current()
        assert all(channel.blocked is here.blocked for channel in here.channels())
        for ranks, process_set in self.sets.items():
            members = [rank for rank in ranks if rank in self.left]
            assert process_set.ranks == [self.left.index(rank) for rank in members]
            if self.own in members:
                assert process_set.rank() == members.index(self.own)
                own = torch.tensor([float(self.own)])
                assert hvd.allreduce(own, op=hvd.Sum, process_set=process_set) == sum(members)
            elif not members:
                with pytest.raises(ValueError, match="has no rank left"):
                    hvd.barrier(process_set=process_set)


def be_killed(*stopped: int) -> None:
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


def ends_with_loss(call: Callable[[], object]) -> bool:
    try:
        call()
    except RanksLostError:
        return True
    return False


def reduce() -> None:
    hvd.allreduce(torch.ones(ELEMENTS), name="broken off")


def reduce_unevenly() -> None:
    """Submit two operations in different orders, of which others wait for the second."""
    names = ["one", "two"] if hvd.rank() % 2 else ["two", "one"]
    for handle in [hvd.allreduce_async(torch.ones(9), name=name) for name in names]:
        hvd.synchronize(handle)


def open_and_close() -> None:
    here = context.current()
    channel = here.open_channel(range(hvd.size()), "one more")
    assert channel is not None
    here.close_channel(channel)


def rest() -> None:
    """Do nothing for longer than it takes to notice, and then something."""
    time.sleep(5 * ENOUGH_SECONDS)
    reduce()


def main() -> None:
    faulthandler.dump_traceback_later(HANGS_SECONDS)
    program = Program()
    program.check()
    program.go_on_without([3], reduce, stopped=2)
    program.go_on_without([0, 5], rest)
    program.go_on_without([4], reduce_unevenly, then=6)
    program.go_on_without([7], open_and_close)
    hvd.shutdown()
    hvd.init()  # with those that are left
    program.sets.clear()
    program.check()
    report(5, program.left)


if __name__ == "__main__":
    main()
