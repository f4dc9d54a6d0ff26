"""What jobs of a scheduler run: job_worker.py slow|dies|fences.

slow: the main job, with a step every two seconds in the first start. Each rank writes for each step
the epoch and the samples that it takes.
dies: says which node or queue each rank is in; then one is killed while the others wait for it.
fences: no rank leaves a fence of PMIx, for which MPI_Init waits, before all have entered it.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# A notice would end a rank that does not handle it yet, or no longer. One that comes before the
# training waits for it, as with the command `train`; one that comes after it is ignored.
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

# ruff: noqa: E402
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.data.sampling import Indices
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.session import train

batches = StepPlan.batches
# Slurm sets one of them in later starts only, Grid Engine the other always.
_FIRST_START = "SLURM_RESTART_COUNT" not in os.environ and os.environ.get("RESTARTED") != "1"


def slow_batches(self: StepPlan, epoch: int, done: int = 0) -> Iterator[tuple[int, Indices]]:
    with open(f"samples-{self.topology.rank}.jsonl", "a", encoding="utf-8") as file:
        for step, batch in batches(self, epoch, done):
            if _FIRST_START:
                time.sleep(2)
            mine = batch[self.own_slice(len(batch))].tolist()
            print(json.dumps([epoch, mine]), file=file, flush=True)
            yield step, batch


def slow() -> None:
    StepPlan.batches = slow_batches  # type: ignore[method-assign]
    out = Path(os.environ["OUT"])
    train(TrainOptions(out=out, resume="auto", epochs=2, global_batch_size=100))


def dies() -> None:
    context.init()
    place = os.environ.get("SLURMD_NODENAME") or os.environ["QUEUE"]
    places = allgather_object(place, "places")
    if context.current().topology.rank == 1:
        print("places", *places, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    allgather_object(None, "never")


def fences() -> None:
    context.init()
    topology = context.current().topology
    fence = ctypes.CDLL("libpmix.so.2", mode=os.RTLD_NOLOAD).PMIx_Fence
    fence.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2
    file = os.open("entered", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, mmap.PAGESIZE)
    entered = (ctypes.c_int64 * topology.size).from_buffer(mmap.mmap(file, mmap.PAGESIZE))
    early = 0
    for number in range(1, 1001):
        entered[topology.rank] = number
        assert fence(None, 0, None, 0) == 0
        early += min(entered) < number
    print(f"early: {early}", flush=True)


{"slow": slow, "dies": dies, "fences": fences}[sys.argv[1]]()
