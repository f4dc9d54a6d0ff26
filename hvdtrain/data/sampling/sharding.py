"""The samples that a rank takes, as functions of the seed, the epoch, the rank and the size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def epoch_permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of the training samples in one epoch, int64 [samples].

    The order is a function of `seed` and `epoch` alone: never of the rank, the size or the
    state of a global random generator.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch))))
    return generator.permutation(samples).astype(np.int64)


def steps_per_epoch(samples: int, global_batch_size: int) -> int:
    """Return the number of global batches that hold all samples; the last may be short."""
    return -(-samples // global_batch_size)


def global_batch(permutation: Indices, step: int, global_batch_size: int) -> Indices:
    """Return the samples of one global batch: permutation[jB : (j + 1)B].

    Args:
        permutation: order of the samples, int64 [n].
    """
    return permutation[step * global_batch_size : (step + 1) * global_batch_size]


def rank_slice(samples: int, rank: int, size: int) -> slice:
    """Return the contiguous part of `samples` items that belongs to `rank`.

    The parts of all ranks follow each other, cover every item exactly once and differ in
    length by at most one; with fewer items than ranks some are empty.
    """
    return slice(rank * samples // size, (rank + 1) * samples // size)


def resolve_rank(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size; those of init() if neither is given."""
    if rank is None and size is None:
        # Deferred, so that data sets can be read without importing the communication core.
        from hvdtrain.core import horovod_api as world

        return world.rank(), world.size()
    if rank is None or size is None:
        raise ValueError(f"give both rank and size, or neither: got rank {rank}, size {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be between 0 and size - 1: got rank {rank}, size {size}")
    return rank, size
