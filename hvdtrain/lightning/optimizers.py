"""The optimizers of a LightningModule, wrapped and given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.torch.tensors.parts import parameters_of


@collective
def wrap(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, options: Mapping[str, Any]
) -> hvd.DistributedOptimizer:
    """Return an optimizer that steps on the gradients of all ranks."""
    hvd.broadcast_optimizer_state(optimizer)
    if type(optimizer) is hvd.DistributedOptimizer:
        return optimizer
    named = list(module.named_parameters())
    known = {id(parameter) for _, parameter in named}
    names = named if all(id(p) in known for p in parameters_of(optimizer)) else None
    return hvd.DistributedOptimizer(optimizer, named_parameters=names, **options)


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the user's optimizer."""
    if type(optimizer) is hvd.DistributedOptimizer:
        return optimizer._optimizer
    return optimizer
