"""Metrics of torchmetrics whose states are gathered by hvdtrain."""

from __future__ import annotations

import torch
from torchmetrics import Metric

import hvdtrain.torch as hvd
from hvdtrain.collective import collective

__all__ = ["gather_states", "synchronize_metrics"]


def synchronize_metrics(model: torch.nn.Module) -> None:
    """Have the metrics of a model combine the states of all ranks in `compute()`."""
    for metric in model.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn in (None, gather_states):
            metric.dist_sync_fn = gather_states
            metric.distributed_available_fn = _joined


@collective
def gather_states(state: torch.Tensor, group: hvd.ProcessSet | None = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, by rank, which may differ in shape (collective).

    Args:
        state: tensor of this rank.
        group: ranks that take part; None for all.
    """
    members = group or hvd.global_process_set
    shapes = hvd.allgather_object(tuple(state.shape), process_set=members)
    flat = hvd.allgather(state.detach().reshape(-1), process_set=members)
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _joined() -> bool:
    return hvd.is_initialized() and hvd.size() > 1
