"""Ranks of which some are killed, while the others go on without them."""

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Sequence

import numpy as np
from ranks import report

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core.membership.world import FailureWatch
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.engines.registry import open_world
from hvdtrain.errors import RanksLostError
from hvdtrain.types import ReduceOp

# More than is staged at once, and enough for the slices of a hierarchy.
COUNT = 400_000
ENOUGH_SECONDS = 0.05
# The test waits 300 s: if ranks hang, it shows where.
HANGS_SECONDS = 240


class Survivor:
    def __init__(self, world: EngineWorld) -> None:
        self.world, self.own = world, world.communicator.rank
        self.left = list(range(world.communicator.size))

    def go_on_without_one_while_another_is_stopped(
        self, lost: int, stopped: int, wakers: Sequence[int]
    ) -> None:
        """Have ranks notice a rank that is killed while they wait for another one.

        All that are named are on one host: process numbers of another one mean nothing there.
        """
        processes = processes_of(self.world.communicator)
        assert self.world.failures is not None
        watch = FailureWatch(self.world.failures)
        if self.own == lost:
            # It ends when all know the processes and watch: none is stopped or lost before.
            reduce(self.world.communicator)
            os.kill(processes[stopped], signal.SIGSTOP)
            _be_killed()
        error = _error_of(reduce, self.world.communicator)
        assert isinstance(self.world.communicator.explained(error), RanksLostError)
        if self.own in wakers:
            os.kill(processes[stopped], signal.SIGCONT)
        watch.stop()
        expected = [number for number in self.left if number != lost]
        self._reopen()
        assert self.left == expected
        self._check_world()

    def go_on_without(
        self, lost: Sequence[int], call: Callable[[Communicator], object], then: int | None = None
    ) -> None:
        """Have ranks be killed in the middle of a call, and one more while the rest reopens.

        Those that make communicators are killed between two calls: Open MPI 5.0.11 crashes if it
        hears of an end while it makes one.
        """
        expected = [number for number in self.left if number not in (*lost, then)]
        if self.own in lost and call is not split:
            threading.Timer(ENOUGH_SECONDS, _be_killed).start()
        while self.left != expected:
            try:
                call(self.world.communicator)
                if self.own in lost and call is split:
                    _be_killed()
            except Exception as error:
                explained = self.world.communicator.explained(error)
                if not isinstance(explained, RanksLostError):
                    raise
                assert {self.left[rank] for rank in explained.ranks} <= {*lost, then}
                if self.own == then:  # before it makes a communicator
                    _be_killed()
                self._reopen()
        self._check_world()

    def _reopen(self) -> None:
        assert self.world.failures is not None
        before, self.world = self.world, self.world.failures.reopen()
        before.communicator.close()
        assert self.world.before is not None
        self.left = [self.left[rank] for rank in self.world.before]

    def _check_world(self) -> None:
        communicator, failures = self.world.communicator, self.world.failures
        assert failures is not None
        assert (communicator.size, self.left[communicator.rank]) == (len(self.left), self.own)
        array = np.full(COUNT, self.own + 1, np.float32)
        communicator.allreduce(Buffer.of(array), ReduceOp.SUM, postscale=2.0)
        assert (array == 2 * sum(number + 1 for number in self.left)).all()
        gathered = np.empty(len(self.left), np.int64)
        own = Buffer.of(np.array([self.own]))
        communicator.allgather(own, Buffer.of(gathered), [1] * len(self.left))
        assert gathered.tolist() == self.left
        sent = np.array([self.own])
        communicator.broadcast(Buffer.of(sent), len(self.left) - 1)
        assert sent.tolist() == self.left[-1:]
        failures.check()
        assert failures.agree(True)
        assert not failures.agree(communicator.rank > 0)


def _be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _error_of(call: Callable[[Communicator], object], communicator: Communicator) -> Exception:
    while True:
        try:
            call(communicator)
        except Exception as error:
            return error


def processes_of(communicator: Communicator) -> list[int]:
    processes = np.empty(communicator.size, np.int64)
    own = Buffer.of(np.array([os.getpid()]))
    communicator.allgather(own, Buffer.of(processes), [1] * communicator.size)
    return [int(process) for process in processes]


def reduce(communicator: Communicator) -> None:
    communicator.allreduce(Buffer.of(np.ones(COUNT, np.float32)), ReduceOp.SUM)


def vote(communicator: Communicator) -> None:
    communicator.start_max(np.zeros(3, np.uint64)).wait()


def split(communicator: Communicator) -> None:
    """Make communicators all the time, and use each once."""
    part = communicator.split(range(communicator.size))
    assert part is not None
    try:
        vote(part)
    except Exception as error:
        raise part.explained(error) from error
    part.close()


def main() -> None:
    faulthandler.dump_traceback_later(HANGS_SECONDS)
    config = Config.from_environ(os.environ)
    engine = "mpi" if config.engine == "auto" else config.engine
    survivor = Survivor(open_world(engine, config, os.environ))
    survivor.go_on_without_one_while_another_is_stopped(6, 2, [3, 4, 5])
    survivor.go_on_without([4], reduce)
    survivor.go_on_without([0], vote)
    survivor.go_on_without([5], split, then=3)
    report(5, survivor.left)


if __name__ == "__main__":
    main()
