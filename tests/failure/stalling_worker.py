"""Ranks of which the last keeps the others waiting, in the cases that the arguments name.

Rank 0 says on stderr, where it also warns, which case begins; the late rank comes when the test
makes a file of that name. Where no rank shall be late, the watch has a clock that each rank holds
unless all is well: so a rank that the machine makes late is no stall.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch
from held_clock import HeldClock, await_files
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core import context

LONG_SECONDS = 1.5
# Of the watch's clock: twice as much is not a stall, and thrice is.
PART_SECONDS = 0.45
CLOCK = HeldClock()

MODEL = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(4)])


def keep_the_others_waiting(case: str) -> None:
    while hvd.rank() == hvd.size() - 1 and not Path(case).exists():
        time.sleep(0.02)


def backward(layers: torch.nn.Module = MODEL) -> None:
    layers(torch.ones(2, 20, requires_grad=True)).sum().backward()


def healthy(optimizer: hvd.DistributedOptimizer) -> None:
    """Leave a step half-filled for long; join early, and go on for long."""
    backward(MODEL[2:])
    CLOCK.go()
    time.sleep(LONG_SECONDS)
    CLOCK.await_look()
    CLOCK.hold()
    optimizer.step()
    resting = threading.Thread(target=rest_between_parts)
    if hvd.rank() == 0:
        resting.start()
    else:
        for number in range(3):
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"lonely {number}")
            assert total.item() == hvd.size() - 1
            tell(f"part {number}")
            await_files(f"rest {number}.0")
    hvd.join()
    if hvd.rank() == 0:
        resting.join()


def rest_between_parts() -> None:
    """Have some time pass on rank 0, which has joined, after each operation of the others."""
    for number in range(3):
        await_files(*(f"part {number}.{rank}" for rank in range(1, hvd.size())))
        CLOCK.move(PART_SECONDS)
        CLOCK.await_look()
        tell(f"rest {number}")


def tell(what: str) -> None:
    Path(f"{what}.{hvd.rank()}").touch()


def late(optimizer: hvd.DistributedOptimizer) -> None:
    CLOCK.go()
    members = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else None
    keep_the_others_waiting("late")
    handles = [hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="late")]
    if members is not None and members.included():
        one = torch.ones(1)
        handles.append(hvd.allreduce_async(one, op=hvd.Sum, name="set", process_set=members))
    backward()
    optimizer.step()
    sizes = [hvd.size(), 2][: len(handles)]
    assert [hvd.synchronize(handle).item() for handle in handles] == sizes


def in_the_middle(optimizer: hvd.DistributedOptimizer) -> None:
    gradients = optimizer._exchanged.gradients
    assert gradients is not None
    gradients.buckets.together = False  # as where ranks have cores to spare
    MODEL[2].register_full_backward_hook(lambda *_: keep_the_others_waiting("in_the_middle"))
    backward()
    optimizer.step()


def leaving(optimizer: hvd.DistributedOptimizer) -> None:
    """Begin again in a new world, and leave it one after the other, however long that takes."""
    hvd.shutdown()
    assert not [t for t in threading.enumerate() if t.name.startswith("hvdtrain-stall")]
    os.environ["HVDTRAIN_STALL_SHUTDOWN_SECONDS"] = "1.2"
    hvd.init()
    keep_the_others_waiting("leaving")


CASES = {case.__name__: case for case in (healthy, late, in_the_middle, leaving)}

if __name__ == "__main__":
    if os.environ["OMPI_COMM_WORLD_RANK"] != "0":
        os.environ["HVDTRAIN_STALL_SECONDS"] = "0"  # the largest of all ranks' counts
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(MODEL.parameters(), lr=0.1))
    # The plan's channel and the world's have the same members, and must be told apart.
    assert [channel.number for channel in context.current().channels()] == [1, 0]
    backward()
    optimizer.step()
    for name in sys.argv[1:]:
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"CASE {name}", file=sys.stderr, flush=True)
        hvd.barrier()  # nobody is late before that is said
        CASES[name](optimizer)
    report(cases=len(sys.argv) - 1)
