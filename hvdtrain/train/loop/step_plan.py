"""Which samples each step of a run takes, in which parts, and at what learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sampling.sharding import (
    Indices,
    epoch_permutation,
    global_batch,
    rank_slice,
    steps_per_epoch,
)
from hvdtrain.topology import Topology
from hvdtrain.train.optimizers.schedule import ScheduleSettings, learning_rate, parse_milestones
from hvdtrain.train.options import TrainOptions

__all__ = ["Microbatch", "StepPlan"]


@dataclass(frozen=True)
class Microbatch:
    """Samples of this rank that go through the model together.

    Attributes:
        key: its number among all ranks' parts of the step, of which random numbers depend.
        samples: by number; there may be none.
    """

    key: int
    samples: Indices


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run, for every framework alike.

    Attributes:
        options: what was asked for.
        topology: the place of this rank.
        samples: to train on.
        shuffled: whether each epoch has an order of its own; a stream has not.
    """

    options: TrainOptions
    topology: Topology
    samples: int
    shuffled: bool = True

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

    @cached_property
    def schedule(self) -> ScheduleSettings:
        """What the learning rates of all steps depend on."""
        options = self.options
        return ScheduleSettings(
            steps_per_epoch=self.steps_per_epoch,
            steps=self.steps_per_epoch * options.epochs,
            base_lr=options.base_lr,
            target_lr=self.target_lr,
            # Where there is nothing to warm up to, the warm-up does not hold a schedule back.
            warmup_epochs=options.warmup_epochs if self.target_lr != options.base_lr else 0.0,
            schedule=options.schedule,
            milestones=parse_milestones(options.milestones),
            decay=options.decay,
            power=options.power,
            final_lr=options.final_lr,
        )

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over all epochs."""
        return learning_rate(step, self.schedule)

    def position(self, epoch: int, done: int) -> int:
        """Return the number over all epochs of the step that comes after `done` samples."""
        return epoch * self.steps_per_epoch + done // self.global_batch_size

    def batches(self, epoch: int, done: int = 0) -> Iterator[tuple[int, Indices]]:
        """Yield the steps of an epoch: each one's number over all epochs, and its global batch.

        Args:
            epoch: counted from 0.
            done: so many samples of it were used before.
        """
        batch_size = self.global_batch_size
        order = self._order(epoch)[done:]
        first = self.position(epoch, done)
        for step in range(steps_per_epoch(len(order), batch_size)):
            yield first + step, global_batch(order, step, batch_size)

    def _order(self, epoch: int) -> Indices:
        if not self.shuffled:
            return np.arange(self.samples)
        return epoch_permutation(self.samples, self.options.seed, epoch)

    def own_slice(self, count: int) -> slice:
        """Return this rank's contiguous part of so many samples; it may be empty."""
        return rank_slice(count, self.topology.rank, self.topology.size)

    def parts(self, batch: Indices) -> list[Microbatch]:
        """Cut this rank's share of a global batch into its passes, or its virtual shards."""
        shards, rank, size = self.options.virtual_shards, self.topology.rank, self.topology.size
        if shards is not None:
            own = range(rank * shards // size, (rank + 1) * shards // size)
            return [Microbatch(key, batch[rank_slice(len(batch), key, shards)]) for key in own]
        mine, passes = batch[self.own_slice(len(batch))], self.options.accumulate
        cut = [mine[rank_slice(len(mine), number, passes)] for number in range(passes)]
        return [
            Microbatch(rank * passes + number, part) for number, part in enumerate(cut) if len(part)
        ]

    def padded(self, samples: Indices, rows: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Return this rank's part of samples in one length, and which of them count.

        A step that a framework compiles for the shape of its batch is so compiled once.

        Args:
            samples: of all ranks.
            rows: the length, not less than this rank's part.
        """
        mine = samples[self.own_slice(len(samples))]
        filled = np.zeros(rows, np.int64)
        filled[: len(mine)] = mine
        return filled, np.arange(rows) < len(mine)
