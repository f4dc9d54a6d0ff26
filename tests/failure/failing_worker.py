"""Ranks that train until one of them goes wrong in the way that the argument names."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core import context, operations
from hvdtrain.types import ReduceOp

LONG_SECONDS = 600


def raises() -> None:
    raise ValueError("boom")


def raises_in_thread(name: str = "loader") -> None:
    threading.Thread(target=raises, name=name).start()
    hvd.allreduce(torch.ones(1), name="never")


def raises_in_own_thread() -> None:
    """Fail in a thread that passes for one of hvdtrain's."""
    raises_in_thread("hvdtrain-thread")


def leaves() -> None:
    sys.exit(0)


def leaves_in_the_middle_of_a_step() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def leave(*_: object) -> None:
        time.sleep(0.2)  # by then the first bucket has been reduced
        raise SystemExit(0)

    if hvd.rank() == 1:
        model[0].register_full_backward_hook(leave)
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()


def leaves_in_backward_before_its_peers() -> None:
    if hvd.rank() != 1:
        time.sleep(1)
    leaves_in_the_middle_of_a_step()


def leaves_between_backward_and_step() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    weight.sum().backward()
    if hvd.rank() == 1:
        sys.exit(0)
    optimizer.step()


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LONG_SECONDS)


def waits() -> None:
    time.sleep(LONG_SECONDS)


def goes_on() -> None:
    while True:
        reduce()


def reduce() -> None:
    ones = Buffer.from_array(np.ones(1000))
    world = context.current().world
    operations.allreduce(world, [ones], [(1000,)], ReduceOp.SUM, "on and on").run()


def train() -> Callable[[], None]:
    model = torch.nn.Linear(50, 50)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 50)).sum().backward()
        optimizer.step()

    return step


def go_wrong(fault: Callable[[], None], step: Callable[[], None]) -> None:
    rank = context.current().topology.rank
    for number in range(6):
        if number == 3:
            if rank == 0:
                print("step 3", flush=True)
            operations.barrier(context.current().world)  # nobody goes wrong before that is said
            if rank == 1 or fault in EVERYWHERE:
                fault()
        step()


EVERYWHERE = (
    *(leaves_in_the_middle_of_a_step, leaves_in_backward_before_its_peers),
    *(leaves_between_backward_and_step, waits, goes_on),
)

# In a loop without torch, whose import takes longer than all else.
PLAIN = (is_terminated, waits, goes_on)

if __name__ == "__main__":
    fault = globals()[sys.argv[1]]
    if fault in PLAIN:
        context.init()
        go_wrong(fault, reduce)
    else:
        import torch

        import hvdtrain.torch as hvd

        hvd.init()
        go_wrong(fault, train())
