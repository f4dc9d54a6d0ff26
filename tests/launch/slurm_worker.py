"""What jobs of Slurm run: slurm_worker.py slow|dies.

slow: the main job, with a step every two seconds in the first start. Each rank writes for each step
the epoch and the samples that it takes.
dies: says on which nodes the ranks are; then one is killed while the others wait for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.data.sharding import Indices
from hvdtrain.train.course import Course
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.session import train

batches = Course.batches


def slow_batches(self: Course, epoch: int, done: int = 0) -> Iterator[tuple[int, Indices]]:
    with open(f"samples-{self.topology.rank}.jsonl", "a", encoding="utf-8") as file:
        for step, batch in batches(self, epoch, done):
            if "SLURM_RESTART_COUNT" not in os.environ:
                time.sleep(2)
            mine = batch[self.mine(len(batch))].tolist()
            print(json.dumps([epoch, mine]), file=file, flush=True)
            yield step, batch


def slow() -> None:
    Course.batches = slow_batches  # type: ignore[method-assign]
    out = Path(os.environ["OUT"])
    train(TrainOptions(out=out, resume="auto", epochs=2, global_batch_size=100))


def dies() -> None:
    context.init()
    nodes = allgather_object(os.environ["SLURMD_NODENAME"], "nodes")
    if context.current().topology.rank == 1:
        print("nodes", *nodes, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    allgather_object(None, "never")


{"slow": slow, "dies": dies}[sys.argv[1]]()
