"""Ranks of which the last keeps the others waiting, in the cases that the arguments name.

Rank 0 says on stderr, where it also warns, which case begins; the late rank comes when the test
makes a file of that name.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core import context

LONG_SECONDS = 1.5

MODEL = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(4)])


def keep_the_others_waiting(case: str) -> None:
    """Wait on the last rank until the test has seen enough."""
    while hvd.rank() == hvd.size() - 1 and not Path(case).exists():
        time.sleep(0.02)


def backward(layers: torch.nn.Module = MODEL) -> None:
    """Compute gradients, of which each layer's fill a bucket."""
    layers(torch.ones(2, 20, requires_grad=True)).sum().backward()


def healthy(optimizer: hvd.DistributedOptimizer) -> None:
    """Leave a step half-filled for long; join early, and go on for long."""
    backward(MODEL[2:])
    time.sleep(LONG_SECONDS)
    optimizer.step()
    for number in range(0 if hvd.rank() == 0 else 12):
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"lonely {number}")
        assert total.item() == hvd.size() - 1
        time.sleep(LONG_SECONDS / 12)
    hvd.join()


def late(optimizer: hvd.DistributedOptimizer) -> None:
    """Submit an operation, one in a process set, and a step; one rank does so late."""
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
    """Take a rest in the backward pass, when some of the buckets are under way."""
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
        CASES[name](optimizer)
    report(cases=len(sys.argv) - 1)
