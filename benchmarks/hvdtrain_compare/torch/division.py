"""Which samples a process takes: exactly, or padded as DistributedSampler does."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.data.sampling import (
    EvaluationSampler,
    Indices,
    global_batch,
    rank_slice,
    steps_per_epoch,
)
from hvdtrain_compare.protocol import Place


class Division(Protocol):
    """Divides samples among processes."""

    def train_shares(self, order: Indices) -> list[Indices]:
        """Return the samples of this process for each step of an epoch."""

    def test_share(self, samples: int) -> Indices:
        """Return the test samples of this process."""


class ExactDivision:
    """Each sample once: hvdtrain's division, and that of a single process."""

    def __init__(self, place: Place, batch: int) -> None:
        self._place, self._batch = place, batch

    def train_shares(self, order: Indices) -> list[Indices]:
        steps = range(steps_per_epoch(len(order), self._batch))
        batches = (global_batch(order, step, self._batch) for step in steps)
        return [batch[rank_slice(len(batch), *self._numbers)] for batch in batches]

    def test_share(self, samples: int) -> Indices:
        return EvaluationSampler(samples, *self._numbers).indices()

    @property
    def _numbers(self) -> tuple[int, int]:
        return self._place.rank, self._place.size


class PaddedDivision:
    """DistributedSampler: samples are repeated until all processes have the same number.

    It divides places in the order of the epoch, so that each step of all processes together has the
    samples that one process would take.
    """

    def __init__(self, place: Place, batch: int) -> None:
        self._place, self._batch = place, batch

    def train_shares(self, order: Indices) -> list[Indices]:
        own = order[self._places(len(order))]
        length = self._batch // self._place.size
        return [own[start : start + length] for start in range(0, len(own), length)]

    def test_share(self, samples: int) -> Indices:
        return self._places(samples)

    def _places(self, samples: int) -> Indices:
        sampler: Any = DistributedSampler(
            range(samples),  # type: ignore[arg-type]
            num_replicas=self._place.size,
            rank=self._place.rank,
            shuffle=False,
        )
        return np.fromiter(sampler, np.int64)
