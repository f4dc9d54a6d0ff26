"""Ranks that record a timeline until one of them does not come; the argument says how it ends."""

from __future__ import annotations

import os
import sys
import time

import torch

import hvdtrain.torch as hvd
from hvdtrain.core.timeline import piece

STEPS = 40


def main(end: str) -> None:
    """Take some steps, and wait on rank 0 for a rank that sleeps."""
    if end == "stalls":
        piece._PAUSE_SECONDS = 1000.0  # all that is written is what is saved at the end
    os.environ["HOROVOD_TIMELINE"] = "it.json"
    hvd.init()
    for step in range(STEPS):
        total = hvd.allreduce(torch.full((10,), hvd.rank() + step), name=f"step {step}", op=hvd.Sum)
        assert total[0] == sum(rank + step for rank in range(hvd.size()))
    if hvd.rank() == 0:
        hvd.allreduce(torch.ones(1), name="stuck")
    time.sleep(600)


main(sys.argv[1])
