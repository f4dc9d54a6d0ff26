"""Reduce numbers that are too small to be normal, with threads that would take them for zeros.

Rank 0 waits where it calls, so that its own thread adds; on the others a thread of hvdtrain's does.
Settings are given to all ranks.
"""

from __future__ import annotations

import os

import torch
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.types import ReduceOp

# By the variables that choose it. What is added, and where, differs between them.
WAYS = {
    "kernel": {"HVDTRAIN_SHARED_MEMORY": "1"},
    "numpy": {"HVDTRAIN_SHARED_MEMORY": "numpy"},
    "mpi": {"HVDTRAIN_SHARED_MEMORY": "0"},
    "fixed order": {"HVDTRAIN_SHARED_MEMORY": "0", "HVDTRAIN_DETERMINISTIC": "1"},
    "gloo": {"HVDTRAIN_ENGINE": "gloo", "HVDTRAIN_DETERMINISTIC": "0"},
}
# Shown whole, in chunks, and (with numpy) in shared memory.
COUNTS = (10, 20_000, 100_000)


def patterns(rank: int, count: int) -> torch.Tensor:
    """Return the bits of float32 numbers; they add like these integers as long as none is 2^23."""
    return torch.arange(count, dtype=torch.int32) % 1000 + 1 + 1000 * rank


def tiny(rank: int, count: int) -> torch.Tensor:
    return patterns(rank, count).view(torch.float32)


def reduced(tensor: torch.Tensor, op: ReduceOp, name: str) -> torch.Tensor:
    if hvd.rank() == 0:
        return hvd.allreduce(tensor, op=op, name=name).view(torch.int32)
    return hvd.synchronize(hvd.allreduce_async(tensor, op=op, name=name)).view(torch.int32)


def faults(way: str) -> list[str]:
    found = []
    ranks = range(hvd.size())
    for count in COUNTS:
        total = torch.stack([patterns(rank, count) for rank in ranks]).sum(0)
        if not torch.equal(reduced(tiny(hvd.rank(), count), hvd.Sum, f"sum {count}"), total):
            found.append(f"{way}: sum of {count}")
        # Equal vectors are averaged.
        if not torch.equal(reduced(tiny(0, count), hvd.Adasum, f"a {count}"), patterns(0, count)):
            found.append(f"{way}: Adasum of {count}")
    scattered = hvd.reducescatter(tiny(hvd.rank(), COUNTS[0]), op=hvd.Sum, name="scattered")
    total = torch.stack([patterns(rank, COUNTS[0]) for rank in ranks]).sum(0)
    own = total.chunk(hvd.size())[hvd.rank()]
    if not torch.equal(scattered.view(torch.int32), own):
        found.append(f"{way}: reduce-scatter")
    return found


assert torch.set_flush_denormal(True)  # before init(), whose threads inherit it
wrong = []
for name, variables in WAYS.items():
    os.environ.update(variables)
    hvd.init()
    wrong += faults(name)
    hvd.shutdown()
    # The caller's own mode is as it was.
    if (torch.tensor(1e-40) * 1.0).view(torch.int32).item() != 0:
        wrong.append(f"{name}: changed the mode of the caller")
report(cases=len(WAYS), payload=wrong)
