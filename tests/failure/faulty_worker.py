"""Ranks that do one thing over and over until their engine fails: FAULT WORK [catches].

`catches` goes on after an error as if nothing had happened, and is busy with itself after another.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from faulty_engine import EngineFault, install

from hvdtrain.buffer import Buffer
from hvdtrain.errors import HvdtrainError
from hvdtrain.types import ReduceOp

ROUNDS = 20
LONG_SECONDS = 600
BUSY = threading.Event()


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
    made = process_sets.add_process_set([0])
    process_sets.remove_process_set(made)


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


def world() -> Channel:
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
    fault = EngineFault.parse(sys.argv[1])
    install(fault)
    from hvdtrain.core import context, exits, operations
    from hvdtrain.core import process_set as process_sets
    from hvdtrain.core.agreement.channel import Channel

    work = globals()[sys.argv[2]]
    # Where the program raises, or asks again, the two seconds after which the job ends are not to
    # be over before.
    if work is not unawaited:
        end_only_when_busy()
    if work is init:
        fault.arm()
    context.init()
    fault.arm()
    do(work, "catches" in sys.argv)
    context.shutdown()
    print(f"all {ROUNDS} rounds are done", flush=True)
