"""DDP in whose backward pass ranks reduce different tensors, because their buckets differ."""

from __future__ import annotations

import torch
from distributed_worker import start
from torch.nn.parallel import DistributedDataParallel

import hvdtrain.torch as hvd


def main() -> None:
    start()
    layers = [torch.nn.Linear(512, 512) for _ in range(3)]  # 1 MiB each
    # Without unused parameters to look for, the first step has one bucket of all gradients.
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers),
        bucket_cap_mb=0.5 if hvd.rank() == 0 else 25.0,
        find_unused_parameters=True,
    )
    model(torch.ones(4, 512)).sum().backward()
    print("after the backward pass", flush=True)


if __name__ == "__main__":
    main()
