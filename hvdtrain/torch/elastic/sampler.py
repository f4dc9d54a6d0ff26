"""A sampler that keeps track of the samples left in an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core.horovod_api import rank, size
from hvdtrain.torch.functions import allgather_object

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distribute the samples left in this epoch evenly over the ranks.

    If their number is not divisible by the number of ranks, the first ones are used again. Call
    record_batch() after each batch and set_epoch() at the end of each epoch; training then
    continues from a loaded state_dict() with the samples that are left, on any number of ranks.

    Args:
        dataset: dataset, of which only the length is used.
        shuffle: whether the order is random, and different in each epoch.
        seed: seed of the order, equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that are left, as set_epoch() and load_state_dict() do (local)."""
        self.num_replicas, self.rank = size(), rank()
        count = len(self.dataset)
        order = list(range(count))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator).tolist()
        self.remaining_indices = [i for i in order if i not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # In step order: the first samples of all ranks, then their second ones, and so on.
        self._distributed = list(islice(cycle(self.remaining_indices), self.total_size))

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with no sample processed (local, the same on all ranks)."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed its batch of this index (local).

        Args:
            batch_idx: index of the batch since the beginning of the iteration.
            batch_size: samples per rank in every batch except the last.
        """
        step = batch_size * self.num_replicas
        self.record_indices(self._distributed[batch_idx * step : (batch_idx + 1) * step])

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record samples as processed; TorchState.sync() shares them with other ranks (local)."""
        self.processed_indices.update(indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the samples processed in it (local)."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state_dict() was taken (local, the same on all ranks)."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    @collective
    def sync(self) -> None:
        """Adopt rank 0's epoch, with the samples that any rank has processed in it (collective)."""
        states = allgather_object(self.state_dict(), "sampler")
        epoch = states[0]["epoch"]
        processed = [s["processed_indices"] for s in states if s["epoch"] == epoch]
        self.load_state_dict({"epoch": epoch, "processed_indices": set().union(*processed)})

    def __iter__(self) -> Iterator[int]:
        return iter(self._distributed[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
