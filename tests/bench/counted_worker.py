"""Ranks that count their calls of the engine: `programs`, `recovery`, or `votes N`."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hvdtrain_bench.scaling.simulation import PROGRAMS, player_of
from ranks import report

from hvdtrain import engines
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core import context
from hvdtrain.engines.communicator import Communicator, EngineWorld, Failures, Pending, poll_until
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.errors import RanksLostError
from hvdtrain.types import ReduceOp


class Counting(LocalCommunicator):
    """A communicator whose calls are noted and go to a real one, from the caller's thread."""

    def __init__(self, inner: Communicator, calls: list[tuple[str, int]]) -> None:
        self.rank, self.size, self._inner, self._calls = inner.rank, inner.size, inner, calls
        self.capabilities = replace(inner.capabilities, concurrent=False)
        self.explained, self.close = inner.explained, inner.close  # type: ignore[method-assign]

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        self._calls.append(("start_max", values.nbytes))
        return self._inner.start_max(values)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self._calls.append(("allreduce", buffer.nbytes))
        self._inner.allreduce(buffer, op, prescale, postscale)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        self._calls.append(("allgather", receive.nbytes))
        self._inner.allgather(send, receive, counts)


def counted(failures: Failures, calls: list[tuple[str, int]]) -> None:
    """Note calls from the next `reopen` on."""
    real_reopen, real_agree = failures.reopen, failures.agree

    def agree(value: bool) -> bool:
        calls.append(("agree", 0))
        return real_agree(value)

    def reopen(newcomer: object = None) -> EngineWorld:
        calls.append(("reopen", 0))
        world = real_reopen()
        assert world.failures is not None
        counted(world.failures, calls)
        return replace(world, communicator=Counting(world.communicator, calls))

    failures.reopen, failures.agree = reopen, agree  # type: ignore[method-assign]


def play_programs() -> dict[str, list[tuple[str, int]]]:
    inner = engines.open_world("mpi", Config.from_environ(os.environ), os.environ).communicator
    found = {}
    for name, (program, _) in PROGRAMS.items():
        calls: list[tuple[str, int]] = []
        player = player_of(name, Counting(inner, calls))
        program(player)
        found[name] = list(calls)
        player.leave()
    return found


def recover() -> list[tuple[str, int]]:
    context.init("mpi")
    here, calls = context.current(), list[tuple[str, int]]()
    assert here.failures is not None
    if here.topology.rank == here.topology.size - 1:
        os._exit(0)  # as if it had ended: it leaves nothing
    counted(here.failures, calls)
    failures = here.failures

    def is_noticed() -> bool:
        try:
            failures.check()
        except RanksLostError:
            return True
        return False

    poll_until(is_noticed)
    assert len(context.recover().lost) == 1
    found = list(calls)
    context.shutdown()
    return found


def vote(times: int) -> None:
    inner = engines.open_world("mpi", Config.from_environ(os.environ), os.environ).communicator
    for _ in range(times):
        inner.start_max(np.arange(6, dtype=np.uint64)).wait()


if sys.argv[1] == "votes":
    vote(int(sys.argv[2]))
    report(1)
else:
    report(1, {"programs": play_programs, "recovery": recover}[sys.argv[1]]())
