"""Samplers for your own training loops: the samples of a rank, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdtrain.data.sampling.position import Position
from hvdtrain.data.sampling.sharding import (
    Indices,
    epoch_permutation,
    global_batch,
    rank_slice,
    resolve_rank,
    steps_per_epoch,
)

__all__ = ["EvaluationSampler", "GlobalBatchSampler"]


class GlobalBatchSampler(Position):
    """Yield this rank's part of each global batch that is left of an epoch, as a list of indices.

    Use it as `batch_sampler` of a torch DataLoader. The order of an epoch is a function of seed
    and epoch alone. Each sample is used once an epoch, on one rank; the parts of a batch differ by
    at most one sample. Every rank gets the same number of batches: a rank without a sample in a
    short last batch gets one index for the sake of its shape, which must not count.

    Everything is local; make the same calls on all ranks.

    Args:
        samples: number of samples.
        batch_size: samples of all ranks per step; the last batch of an epoch may have fewer.
        seed: seed of the order; the same on all ranks.
        rank: this rank, together with `size`; None: as init() found it.
        size: number of ranks.

    Raises:
        ValueError: a number is out of range.
        NotInitializedError: rank and size are not given, before init().
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(samples, batch_size, {"seed": seed})
        self._seed = seed
        self._rank, self._size = resolve_rank(rank, size)

    def __len__(self) -> int:
        """Return the number of batches left of this epoch, the same on all ranks."""
        return steps_per_epoch(self.samples - self.consumed, self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of indices, none of them empty, from the current position on."""
        # Not a generator: what advance() does later must not move a loader that reads ahead.
        return self._parts(self._order(), padded=True)

    @property
    def counts(self) -> list[int]:
        """Number of indices that count in each list of __iter__(); 0 if its only index is a filler.

        Read it once, before the loop, together with the loader: zip(loader, sampler.counts).
        """
        parts = [self._mine(count) for count in self.global_counts]
        return [part.stop - part.start for part in parts]

    @property
    def global_counts(self) -> list[int]:
        """Number of samples of all ranks in each batch, which turns a sum into their mean."""
        left = self.samples - self.consumed
        return [min(self.batch_size, left - start) for start in range(0, left, self.batch_size)]

    def indices(self) -> Indices:
        """Return this rank's samples of the rest of the epoch, in order, int64 [sum(counts)]."""
        return np.array(
            [index for part in self._parts(self._order(), padded=False) for index in part],
            dtype=np.int64,
        )

    def _order(self) -> Indices:
        return epoch_permutation(self.samples, self._seed, self.epoch)[self.consumed :]

    def _mine(self, count: int) -> slice:
        return rank_slice(count, self._rank, self._size)

    def _parts(self, order: Indices, padded: bool) -> Iterator[list[int]]:
        for step in range(steps_per_epoch(len(order), self.batch_size)):
            batch = global_batch(order, step, self.batch_size)
            mine = batch[self._mine(len(batch))]
            yield (batch[:1] if padded and not len(mine) else mine).tolist()


class EvaluationSampler:
    """Yield this rank's samples to evaluate: each sample on exactly one rank, in order.

    Use it as `sampler` of a torch DataLoader. Nothing is padded or omitted, so that ranks may
    differ by one sample and in their number of batches, or have none: add up sums and counts
    locally, and reduce them once, after the loop. Everything is local.

    Args:
        samples: number of samples.
        rank: this rank, together with `size`; None: as init() found it.
        size: number of ranks.

    Raises:
        ValueError: a number is out of range.
        NotInitializedError: rank and size are not given, before init().
    """

    def __init__(self, samples: int, rank: int | None = None, size: int | None = None) -> None:
        if samples < 0:
            raise ValueError(f"samples must be at least 0, got {samples}")
        part = rank_slice(samples, *resolve_rank(rank, size))
        self._mine = range(part.start, part.stop)

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        return len(self._mine)

    def __iter__(self) -> Iterator[int]:
        """Yield their indices."""
        return iter(self._mine)

    def indices(self) -> Indices:
        """Return their indices, int64 [n]."""
        return np.array(self._mine, dtype=np.int64)
