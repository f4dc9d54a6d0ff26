"""Adasum for optimizers: ranks step on their own gradients, and their steps are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.core.process_set import ProcessSet
from hvdtrain.torch.parameters import owned
from hvdtrain.torch.reduce import allreduce_handle
from hvdtrain.types import ReduceOp

__all__ = ["adasum_step"]


def adasum_step(
    optimizer: torch.optim.Optimizer,
    process_set: ProcessSet,
    closure: Callable[[], Any] | None = None,
) -> Any:
    """Take w = w + adasum_r(step_r(w) - w) with the steps of all ranks (collective).

    Args:
        optimizer: steps on this rank's gradients.
        process_set: the ranks that take part.
        closure: handed to the optimizer.
    """
    parameters = [p for p in owned(optimizer) if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    loss = optimizer.step(closure)
    with torch.no_grad():
        steps = [p - start for p, start in zip(parameters, before, strict=True)]
        if steps:
            combined = allreduce_handle(
                steps, ReduceOp.ADASUM, "adasum step", process_set=process_set, in_place=True
            ).wait()
            for parameter, start, step in zip(parameters, before, combined, strict=True):
                parameter.copy_(start + step)
    return loss
