"""Ranks whose data come from data-loader workers, which are no ranks. Argument: start method."""

from __future__ import annotations

import sys

import torch
from ranks import report
from torch.utils.data import DataLoader, Dataset

import hvdtrain.torch as hvd

if sys.argv[2:] == ["unguarded"]:
    hvd.init()


class Probe(Dataset[torch.Tensor]):
    """Each sample says whether the process that made it has loaded MPI or is a rank."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        initialised = False
        if "mpi4py.MPI" in sys.modules:  # inherited by a fork: it must not be used
            initialised = hvd.is_initialized()
        return torch.tensor([index, int(initialised)])


if __name__ == "__main__":
    hvd.init()
    loader = DataLoader(Probe(), 2, num_workers=2, multiprocessing_context=sys.argv[1])
    batches = torch.cat(list(loader))
    assert batches[:, 0].tolist() == list(range(8))
    assert batches[:, 1].sum() == 0
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    report(cases=1)
