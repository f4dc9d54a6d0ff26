"""Which samples a process takes: each once, or as the samplers of other libraries do."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from hvdtrain.data.sampling import (
    EvaluationSampler,
    Indices,
    global_batch,
    rank_slice,
    steps_per_epoch,
)
from hvdtrain_bench.compare.protocol import ProcessPlace

EVALUATED_TOGETHER = 128


class Division(Protocol):
    """Divides samples among processes."""

    def train_shares(self, order: Indices) -> list[Indices]:
        """Return the samples of this process for each step of an epoch."""

    def test_share(self, samples: int) -> Indices:
        """Return the test samples of this process."""


class ExactDivision:
    """Each sample once: hvdtrain's division, and that of a single process."""

    def __init__(self, place: ProcessPlace, batch: int) -> None:
        self._place, self._batch = place, batch

    def train_shares(self, order: Indices) -> list[Indices]:
        steps = range(steps_per_epoch(len(order), self._batch))
        batches = (global_batch(order, step, self._batch) for step in steps)
        place = self._place
        return [batch[rank_slice(len(batch), place.rank, place.size)] for batch in batches]

    def test_share(self, samples: int) -> Indices:
        return EvaluationSampler(samples, self._place.rank, self._place.size).indices()


class ShardedDivision(ExactDivision):
    """The batches of tf.data's shard(), as many as all processes can fill."""

    def train_shares(self, order: Indices) -> list[Indices]:
        own, each = order[self._place.rank :: self._place.size], self._batch // self._place.size
        steps = range(len(order) // self._batch)
        return [own[step * each : (step + 1) * each] for step in steps]


class PaddedDivision(ExactDivision):
    """DistributedSampler: samples are repeated until all processes have the same number.

    It divides places in the order of the epoch, so that each step of all processes together has the
    samples that one process would take.
    """

    def train_shares(self, order: Indices) -> list[Indices]:
        own = order[self.test_share(len(order))]
        length = self._batch // self._place.size
        return [own[start : start + length] for start in range(0, len(own), length)]

    def test_share(self, samples: int) -> Indices:
        from torch.utils.data.distributed import DistributedSampler

        sampler: Any = DistributedSampler(
            range(samples),  # type: ignore[arg-type]
            num_replicas=self._place.size,
            rank=self._place.rank,
            shuffle=False,
        )
        return np.fromiter(sampler, np.int64)
