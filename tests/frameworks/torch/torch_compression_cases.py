"""Optimizers with compressed gradients."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch_training import Model, batch, case

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.catalog import make_exchange


def average(model: Model, step: int) -> None:
    """Compute the average of all ranks' samples."""
    inputs, labels = batch(step)
    model.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()


@case
def what_codes_cannot_hold_does_not_stay() -> None:
    """The squares of finite gradients overflow while they are coded."""
    exchange = make_exchange("nbit:bits=8,block=8")
    exchange.hierarchical = False
    weight = torch.nn.Parameter(torch.zeros(16, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), exchange=exchange)
    for scale in (1.0, 1e200, 1.0):
        optimizer.zero_grad()
        (weight * torch.arange(16) * scale * (1 + hvd.rank())).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        assert bool(weight.grad.isfinite().all()) == (scale == 1.0 or hvd.size() == 1), scale
