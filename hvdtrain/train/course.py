"""Which samples each step of a run takes, and at what learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sharding import (
    Indices,
    epoch_permutation,
    global_batch,
    rank_slice,
    steps_per_epoch,
)
from hvdtrain.topology import Topology
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.schedule import warmup_lr

__all__ = ["Course"]


@dataclass(frozen=True)
class Course:
    """The steps of a run, for every framework alike.

    Attributes:
        options: what was asked for.
        topology: the place of this rank.
        samples: to train on.
    """

    options: TrainOptions
    topology: Topology
    samples: int

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks per step; the last step of an epoch may have fewer."""
        return self.options.samples_per_step(self.topology.size)

    @property
    def steps_per_epoch(self) -> int:
        """How many steps use every sample once."""
        return steps_per_epoch(self.samples, self.global_batch_size)

    @property
    def target_lr(self) -> float:
        """The learning rate after the warm-up."""
        return self.options.scaled_lr(self.topology.size)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over all epochs."""
        base, warmup = self.options.base_lr, self.options.warmup_epochs
        return warmup_lr(step, self.steps_per_epoch, base, self.target_lr, warmup)

    def batches(self, epoch: int, done: int = 0) -> Iterator[tuple[int, Indices]]:
        """Yield the steps of an epoch: each one's number over all epochs, and its global batch.

        Args:
            epoch: counted from 0.
            done: so many samples of it were used before.
        """
        batch_size = self.global_batch_size
        order = epoch_permutation(self.samples, self.options.seed, epoch)[done:]
        first = epoch * self.steps_per_epoch + done // batch_size
        for step in range(steps_per_epoch(len(order), batch_size)):
            yield first + step, global_batch(order, step, batch_size)

    def mine(self, count: int) -> slice:
        """Return this rank's contiguous part of so many samples; it may be empty."""
        return rank_slice(count, self.topology.rank, self.topology.size)

    def padded(self, samples: Indices, rows: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Return this rank's part of samples in one length, and which of them count.

        A step that a framework compiles for the shape of its batch is so compiled once.

        Args:
            samples: of all ranks.
            rows: the length, not less than this rank's part.
        """
        mine = samples[self.mine(len(samples))]
        filled = np.zeros(rows, np.int64)
        filled[: len(mine)] = mine
        return filled, np.arange(rows) < len(mine)
