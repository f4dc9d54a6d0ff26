"""Ranks that do one thing over and over until their engine fails: FAULT WORK [catches].

FAULT is PRIMITIVE:CALL:RANK, of calls from 0: "allreduce:5:1" is the sixth all-reduce of rank 1.
`catches` goes on after an error as if nothing had happened, and is busy with itself after another.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain import engines
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.errors import HvdtrainError
from hvdtrain.types import ReduceOp

ROUNDS = 20
LONG_SECONDS = 600
BUSY = threading.Event()


class EngineCallError(RuntimeError):
    """What a call raises that is to fail."""


@dataclass
class EngineFault:
    primitive: str
    call: int
    rank: int
    armed: bool = False

    def meet(self, primitive: str, rank: int) -> None:
        watch = threading.current_thread().name.startswith("hvdtrain-stall")
        if not self.armed or primitive != self.primitive or rank != self.rank or watch:
            return
        self.call -= 1
        if self.call == -1:
            print("the fault", file=sys.stderr, flush=True)
            raise EngineCallError("the engine failed")


def install(fault: EngineFault) -> None:
    """Have the world of this process meet a fault; call it before hvdtrain.core is imported."""
    assert "hvdtrain.core.context" not in sys.modules
    real = engines.open_world

    def open_world(name: str, config: Config, environ: Mapping[str, str]) -> EngineWorld:
        world = real(name, config, environ)
        faulty = _FaultyCommunicator(world.communicator, fault, world.communicator.rank)
        return replace(world, communicator=faulty)

    engines.open_world = open_world


def _meeting(name: str, primitive: str = "") -> Any:
    def call(self: "_FaultyCommunicator", *arguments: Any, **named: Any) -> Any:
        self._fault.meet(primitive or name, self._world_rank)
        return getattr(self._inner, name)(*arguments, **named)

    return call


class _FaultyCommunicator(Communicator):
    """A communicator whose calls go to a real one, but for a fault; its children are alike."""

    def __init__(self, inner: Communicator, fault: EngineFault, world_rank: int) -> None:
        self.rank, self.size, self.capabilities = inner.rank, inner.size, inner.capabilities
        self._inner, self._fault, self._world_rank = inner, fault, world_rank

    start_max, allreduce, broadcast, allgather, alltoall = map(
        _meeting, ("start_max", "allreduce", "broadcast", "allgather", "alltoall")
    )
    reduce_scatter, barrier, empty, close, put, abort = map(
        _meeting, ("reduce_scatter", "barrier", "empty", "close", "put", "abort")
    )
    allreduce_from = _meeting("allreduce_from", "allreduce")

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        self._fault.meet("split", self._world_rank)
        child = self._inner.split(ranks)
        return child and _FaultyCommunicator(child, self._fault, self._world_rank)


def values(count: int = 12) -> Buffer:
    return Buffer.from_array(np.arange(count) + float(context.current().topology.rank))


def allreduce() -> None:
    operations.allreduce(world(), [values()], [(12,)], ReduceOp.SUM, "numbers").run()


def allreduces() -> None:
    """Reduce several together, in memory of the engine's."""
    submitted = [
        operations.allreduce(world(), [values()], [(12,)], ReduceOp.SUM, f"numbers {n}").start()
        for n in range(3)
    ]
    for each in submitted:
        each.wait()


def unawaited() -> None:
    operations.allreduce(world(), [values()], [(12,)], ReduceOp.SUM, "numbers").start()
    time.sleep(LONG_SECONDS)


def in_other_orders() -> None:
    """Reduce a before b on rank 0, which the others begin with: so requests are exchanged."""
    a, b = (
        operations.allreduce(world(), [values()], [(12,)], ReduceOp.SUM, f"numbers {name}")
        for name in "ab"
    )
    if context.current().topology.rank == 0:
        a.run()
        b.run()
    else:
        b.start()
        a.run()
        b.wait()


def alltoall() -> None:
    operations.alltoall(world(), values(), (12,), None, "numbers").run()


def process_set() -> None:
    process_sets.remove_process_set(process_sets.add_process_set([0]))


def step() -> None:
    import torch

    import hvdtrain.torch as hvd

    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()


def init() -> None:
    """Do nothing but init() and shutdown(), and meet the fault in the first."""


def shutdown() -> None:
    """Do nothing but init() and shutdown(), and meet the fault in the second."""


def world() -> Any:
    return context.current().world


def end_only_when_busy() -> None:
    """Have the job end only when the program has caught the later error, not after two seconds."""
    end = exits.ExitGuard._end_for

    def waiting(self: exits.ExitGuard, reason: str) -> None:
        BUSY.wait()
        end(self, reason)

    exits.ExitGuard._end_for = waiting  # type: ignore[method-assign]


def do(work: Callable[[], None], catches: bool) -> None:
    """Do it many times; a program that catches an error tries again, and then is busy for long."""
    for _ in range(ROUNDS):
        try:
            work()
        except Exception as error:
            if not catches:
                raise
            print(f"caught {type(error).__name__}: {error}", flush=True)
            if isinstance(error, HvdtrainError):
                BUSY.set()
                time.sleep(LONG_SECONDS)


if __name__ == "__main__":
    primitive, call, rank = sys.argv[1].split(":")
    fault = EngineFault(primitive, int(call), int(rank))
    install(fault)
    from hvdtrain.core import context, exits, operations
    from hvdtrain.core import process_set as process_sets

    work = globals()[sys.argv[2]]
    # Where the program raises, or asks again, the two seconds after which the job ends are not to
    # be over before.
    if work is not unawaited:
        end_only_when_busy()
    if work is init:
        fault.armed = True
    context.init()
    fault.armed = True
    do(work, "catches" in sys.argv)
    context.shutdown()
    print(f"all {ROUNDS} rounds are done", flush=True)
