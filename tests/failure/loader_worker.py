"""Ranks whose data come from data-loader workers; with "unguarded", these call init() as well."""

import sys

import torch
from ranks import report
from torch.utils.data import DataLoader, Dataset

import hvdtrain.torch as hvd

if "unguarded" in sys.argv:
    hvd.init()


def mpi_is_initialized() -> bool:
    """Return whether this process has joined MPI itself, or was forked from one that had."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


class Probe(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(hvd.is_initialized()), int(mpi_is_initialized())])


if __name__ == "__main__":
    hvd.init()
    for method in ("spawn",) if "unguarded" in sys.argv else ("fork", "spawn"):
        loader = DataLoader(Probe(), 2, num_workers=1, multiprocessing_context=method)
        batches = torch.cat(list(loader))
        assert batches[:, 0].tolist() == list(range(8))
        assert batches[:, 1].sum() == 0
        # A fork inherits MPI, and must not use it; a process of its own must have none.
        assert batches[:, 2].tolist() == [int(method == "fork")] * 8
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    report(cases=1)
