"""The steps of a run: the samples of each step, its microbatches and its learning rate."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvdtrain.core import context
from hvdtrain.core.ordered import branch
from hvdtrain.data.sampling import (
    Indices,
    epoch_permutation,
    global_batch,
    rank_slice,
    steps_per_epoch,
)
from hvdtrain.milestones import RESTARTS
from hvdtrain.topology import Topology
from hvdtrain.train.options import TrainOptions, parse_milestones

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


# Of --find-lr, in rates for one rank: the same on any number of ranks.
_FIRST_RATE, _LAST_RATE = 0.01, 1000.0


@dataclass(frozen=True)
class Microbatch:
    """Samples of this rank that go through the model together, and whether they count."""

    key: int
    samples: Indices
    counted: bool = True

    @property
    def count(self) -> int:
        """The number of samples that count."""
        return len(self.samples) if self.counted else 0


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

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every sample once."""
        return steps_per_epoch(self.samples, self.global_batch_size)

    @cached_property
    def steps(self) -> int:
        """Number of steps of all epochs, or of --find-lr."""
        return self.options.find_lr or self.steps_per_epoch * self.epochs

    @cached_property
    def target_lr(self) -> float:
        """Learning rate after the warm-up."""
        return self.options.scaled_lr(self.ranks or self.topology.size)

    @cached_property
    def _milestones(self) -> tuple[float, ...]:
        return parse_milestones(self.options.milestones)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over all epochs.

        The warm-up is Horovod's: with the base rate of one rank, the target T, k = T / base,
        W warm-up epochs and x = (step + 1) / steps_per_epoch,

            lr = T / k * (x * (k - 1) / W + 1)    while x < W

        Its last step has exactly the target. Without scaling k is 1, and there is none. With the
        final rate F and t, which runs from 0 at the last step of the warm-up (the first step,
        without one) to 1 at the very last, it then is:

            constant    T
            step        T * decay ** (milestones reached), an epoch e being reached at step
                        e * steps_per_epoch: Goyal et al., arXiv:1706.02677; torch's MultiStepLR
            cosine      F + (T - F) * (1 + cos(pi t)) / 2: Loshchilov and Hutter, arXiv:1608.03983,
                        without restarts; torch's CosineAnnealingLR
            polynomial  F + (T - F) * (1 - t) ** power: You et al., arXiv:1708.03888, with power 2;
                        torch's PolynomialLR

        Milestones are epochs of the run, so a warm-up does not move them. If the warm-up is as long
        as the run, nothing decays.

        With --find-lr it grows by a factor from step to step: Smith, arXiv:1506.01186.
        """
        if self.options.find_lr is not None:
            growth = (_LAST_RATE / _FIRST_RATE) ** (1 / (self.options.find_lr - 1))
            return float(self.options.base_lr * _FIRST_RATE * growth**step)
        options, base, target = self.options, self.options.base_lr, self.target_lr
        epochs_done = (step + 1) / self.steps_per_epoch
        warmup = options.warmup_epochs if target != base else 0.0
        if epochs_done < warmup:
            factor = target / base
            return target / factor * (epochs_done * (factor - 1) / warmup + 1)
        if options.schedule == "constant":
            return target
        if options.schedule == "step":
            reached = bisect_right(self._milestones, step / self.steps_per_epoch)
            rate: float = target * options.decay**reached
            return rate
        # The factor compensates for a product that was rounded up.
        warmup_steps = math.ceil(warmup * self.steps_per_epoch * (1 - 1e-12))
        first, last = max(warmup_steps - 1, 0), self.steps - 1
        part = min(max((step - first) / (last - first), 0.0), 1.0) if last > first else 0.0
        if options.schedule == "cosine":
            left = (1 + math.cos(math.pi * part)) / 2
        else:
            left = (1 - part) ** options.power
        return options.final_lr + (target - options.final_lr) * left

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

    def microbatches(self, batch: Indices, filled: bool = False) -> list[Microbatch]:
        """Split this rank's part of a global batch into backward passes, or into virtual shards.

        If `filled`, all ranks have as many passes, some with a sample that does not count.
        """
        shards, rank, size = self.options.virtual_shards, self.topology.rank, self.topology.size
        if shards is not None:
            keys = branch(shards, rank, size)
            return [Microbatch(key, batch[rank_slice(len(batch), key, shards)]) for key in keys]
        own, passes = batch[self.own_slice(len(batch))], self.options.accumulate
        if filled:
            passes = min(passes, -(-len(batch) // self.options.worker_count(size)))
        parts = [own[rank_slice(len(own), number, passes)] for number in range(passes)]
        return [
            Microbatch(rank * passes + number, part if len(part) else batch[:1], len(part) > 0)
            for number, part in enumerate(parts)
            if len(part) or filled
        ]


def padded(own: Indices, rows: int) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Return a rank's samples padded to [rows], for a compiled step, and which of them count."""
    filled = np.zeros(rows, np.int64)
    filled[: len(own)] = own
    return filled, np.arange(rows) < len(own)
