"""The steps of a run: the samples of each step, its microbatches and its learning rate."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvdtrain.core import context
from hvdtrain.core.collectives.ordered import branch
from hvdtrain.data.sampling import (
    Indices,
    epoch_permutation,
    global_batch,
    rank_slice,
    steps_per_epoch,
)
from hvdtrain.milestones import RESTARTS
from hvdtrain.topology import Topology
from hvdtrain.train.optimizers.schedule import ScheduleSettings, learning_rate, parse_milestones
from hvdtrain.train.options import TrainOptions

# Name of a file; that of each process ends with its number.
_VARIABLE = "HVDTRAIN_LEDGER"


def note_samples(epoch: int, done: int, own: Indices) -> None:
    """Append a line about the next step, if HVDTRAIN_LEDGER asks for it.

    A step counts if ranks continue from a later point: lines are written before it, as a rank
    that is killed after it has no time to.
    """
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    size = context.current().topology.size
    start = int(os.environ.get(RESTARTS, "0"))
    line = {"epoch": epoch, "done": done, "start": start, "ranks": size, "samples": own.tolist()}
    with open(f"{path}.{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Microbatch:
    """Samples of this rank that go through the model together."""

    key: int
    samples: Indices


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run, the same for every framework."""

    options: TrainOptions
    topology: Topology
    samples: int
    shuffled: bool = True
    ranks: int | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks per step; the last step of an epoch may have fewer."""
        return self.options.samples_per_step(self.ranks or self.topology.size)

    @property
    def epochs(self) -> int:
        """Number of epochs, those before a resume included."""
        return self.options.epochs_with(self.ranks or self.topology.size)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every sample once."""
        return steps_per_epoch(self.samples, self.global_batch_size)

    @property
    def target_lr(self) -> float:
        """Learning rate after the warm-up."""
        return self.options.scaled_lr(self.ranks or self.topology.size)

    @cached_property
    def schedule(self) -> ScheduleSettings:
        """Everything that the learning rates of the steps depend on."""
        options = self.options
        return ScheduleSettings(
            steps_per_epoch=self.steps_per_epoch,
            steps=self.steps_per_epoch * self.epochs,
            base_lr=options.base_lr,
            target_lr=self.target_lr,
            # Without a rate to warm up to, the warm-up does not delay the schedule.
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
        """Return the number, over all epochs, of the step after `done` samples of an epoch."""
        return epoch * self.steps_per_epoch + done // self.global_batch_size

    def batches(self, epoch: int, done: int = 0) -> Iterator[tuple[int, Indices]]:
        """Yield the steps of an epoch: the number of each over all epochs, and its global batch."""
        batch_size = self.global_batch_size
        order = self.order(epoch)[done:]
        first = self.position(epoch, done)
        for step in range(steps_per_epoch(len(order), batch_size)):
            yield first + step, global_batch(order, step, batch_size)

    def order(self, epoch: int) -> Indices:
        """Return the numbers of the samples of an epoch, in the order in which they are taken."""
        if not self.shuffled:
            return np.arange(self.samples)
        return epoch_permutation(self.samples, self.options.seed, epoch)

    def own_slice(self, count: int) -> slice:
        """Return this rank's contiguous part of `count` samples; it may be empty."""
        topology = self.topology  # ranks that compute no gradients come last
        return rank_slice(count, topology.rank, self.options.worker_count(topology.size))

    def microbatches(self, batch: Indices) -> list[Microbatch]:
        """Split this rank's part of a global batch into backward passes, or into virtual shards."""
        shards, rank, size = self.options.virtual_shards, self.topology.rank, self.topology.size
        if shards is not None:
            keys = branch(shards, rank, size)
            return [Microbatch(key, batch[rank_slice(len(batch), key, shards)]) for key in keys]
        own, passes = batch[self.own_slice(len(batch))], self.options.accumulate
        parts = [own[rank_slice(len(own), number, passes)] for number in range(passes)]
        return [
            Microbatch(rank * passes + number, part)
            for number, part in enumerate(parts)
            if len(part)
        ]


def padded(own: Indices, rows: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Return a rank's samples padded to one length, and which of them count.

    Padding lets a framework that compiles a step for the shape of its batch compile it once.

    Returns:
        Numbers of samples, int64 [rows], and whether each counts, bool [rows].
    """
    filled = np.zeros(rows, np.int64)
    filled[: len(own)] = own
    return filled, np.arange(rows) < len(own)
