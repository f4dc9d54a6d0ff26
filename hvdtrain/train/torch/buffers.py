"""Buffers of a model that each rank has changed by itself."""

from __future__ import annotations

import torch

import hvdtrain.torch as hvd

__all__ = ["average_buffers"]


def average_buffers(model: torch.nn.Module) -> None:
    """Make buffers equal on all ranks: real numbers averaged, others as rank 0's (collective).

    Batch normalisation keeps running means and variances of the samples that a rank has seen. They
    do not change what is learned, but what an evaluation finds.
    """
    buffers = list(model.buffers())
    real = [buffer for buffer in buffers if buffer.is_floating_point()]
    if real:
        hvd.grouped_allreduce_(real, name="buffers")
    rest = [(str(n), b) for n, b in enumerate(buffers) if not b.is_floating_point()]
    if rest:
        hvd.broadcast_parameters(rest, root_rank=0)
