"""The job as a script that torchrun starts again from its last checkpoint: restarted.py FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from hvdtrain_bench.elastic.notes import BATCH, STEPS, Notes
from hvdtrain_bench.elastic.work import build_model, make_optimizer, make_samples

STEPS_PER_CHECKPOINT = 20


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    notes, file = Notes(Path(folder)), Path(folder) / "checkpoint.pt"
    model = build_model()
    optimizer = make_optimizer(model)
    first = 0
    if file.exists():
        saved: dict[str, Any] = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["steps"]
    parallel = DistributedDataParallel(model)
    inputs, targets = make_samples()
    notes.world(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), first * BATCH * size)
    for step in range(first, STEPS):
        begin = (step * size + rank) * BATCH
        chosen = slice(begin, begin + BATCH)
        notes.begin(range(begin, begin + BATCH))
        optimizer.zero_grad()
        F.cross_entropy(parallel(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
        notes.end()
        if rank == 0 and (step + 1) % STEPS_PER_CHECKPOINT == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "steps": step + 1}, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
