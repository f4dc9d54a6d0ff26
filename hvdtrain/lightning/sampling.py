"""Samplers of Lightning that give each sample to exactly one rank."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler

__all__ = ["omit_padding"]


def omit_padding(loader: object) -> None:
    """Have a loader's DistributedSampler repeat no samples (local).

    Ranks may then differ by one sample, and in their number of batches.

    Args:
        loader: anything; only a DataLoader with such a sampler is changed.
    """
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    if isinstance(sampler, DistributedSampler):
        samples = len(cast(Any, sampler.dataset))
        sampler.drop_last = False
        sampler.total_size = samples
        sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))
