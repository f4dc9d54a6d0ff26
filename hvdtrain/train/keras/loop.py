"""Epochs of `fit` and `evaluate`, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.data.dataset import Samples
from hvdtrain.data.sampling.seeds import seed_generators, step_seed
from hvdtrain.train.keras.array_rows import ArrayRows
from hvdtrain.train.keras.replica import KerasReplica
from hvdtrain.train.loop.course import Course
from hvdtrain.train.metrics.totals import Totals, Values
from hvdtrain.train.optimizers.make_keras import keras_optimizer
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["KerasLoop"]


class KerasLoop(KerasReplica):
    """A compiled model in training.

    Args:
        recipe: model, data, loss and optimizer.
        course: the steps.
    """

    def __init__(self, recipe: Recipe, course: Course) -> None:
        self._rates = _Rates(course)
        optimizer = hvd.DistributedOptimizer(_optimizer(recipe, course, self._rates), op=hvd.Sum)
        super().__init__(recipe, course, optimizer)
        self._in_memory = isinstance(recipe.train, Samples) and recipe.augment is None
        self.model.compile(optimizer, self.loss, weighted_metrics=[self.tally])

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.course.lr(max(int(self.optimizer.iterations) + (self._rates.ahead or 0) - 1, 0))

    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        """Use the training samples that are left of an epoch; return sums (collective).

        Args:
            epoch: counted from 0.
            done: how many of its samples were used before.
            go_on: called after each optimizer step; where it returns False, on all ranks at the
                same step, that was the last one.
        """
        first = self.course.position(epoch, done)
        if self._rates.ahead is None:
            self._rates.ahead = first - int(self.optimizer.iterations)
        batches = [batch for _, batch in self.course.batches(epoch, done)]
        data = _Batches(self.data, self.course, batches, self.rows, epoch)
        steps = _Steps(self.course, first, go_on)
        self.model.fit(
            **(data.joined() if self._in_memory else {"x": data}),
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[steps],
        )
        # The tally counts in float32, which skips numbers above 2^24.
        used = sum(len(batch) for batch in batches[: steps.taken])
        return replace(self.tally.reduced(), samples=used)

    def evaluate(self) -> Values:
        """Return loss and metrics of all test samples, each seen by one rank (collective)."""
        if self.test is None:
            return {}
        rows, taken, batch = self.test_rows()
        inputs, targets = self.test.read(rows)
        weights = taken.astype(self.course.options.dtype)
        self.model.evaluate(inputs, targets, sample_weight=weights, batch_size=batch, verbose=0)
        return self.tally.reduced().values(self.metrics)


class _Batches(keras.utils.PyDataset):
    """The batches of this rank, read one by one."""

    def __init__(
        self, data: ArrayRows, course: Course, batches: list[Any], rows: int, epoch: int
    ) -> None:
        super().__init__()
        self._data, self._course, self._epoch = data, course, epoch
        self._all, self._rows = batches, rows

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> tuple[Any, Any, Any]:
        """Return inputs, targets and the weights of samples."""
        rows, taken = self._course.padded(self._all[number], self._rows)
        weights = (taken / len(self._all[number])).astype(self._course.options.dtype)
        return *self._data.read(rows, self._epoch), weights

    def joined(self) -> dict[str, Any]:
        """Return them all in one piece, which `fit` goes through faster."""
        parts = [self._course.padded(batch, self._rows) for batch in self._all]
        counts = np.repeat([len(batch) for batch in self._all], self._rows)
        inputs, targets = self._data.read(np.concatenate([rows for rows, _ in parts]))
        weights = np.concatenate([taken for _, taken in parts]) / counts
        return {"x": inputs, "y": targets, "sample_weight": weights, "batch_size": self._rows}


class _Steps(keras.callbacks.Callback):
    """Seeds random generators before each step, and asks after it whether to go on.

    Attributes:
        taken: how many steps there were.
    """

    def __init__(self, course: Course, first: int, go_on: Callable[[], bool]) -> None:
        super().__init__()
        self._course, self._first, self._go_on = course, first, go_on
        self.taken = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Seed for this step and rank: on torch, Dropout draws from torch's own generator."""
        seed, rank = self._course.options.seed, self._course.topology.rank
        seed_generators(step_seed(seed, self._first + batch, rank))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Have `fit` return after this step where that is the answer."""
        self.taken += 1
        if not self._go_on():
            self.model.stop_training = True


class _Rates(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rates of a course, as part of the compiled step.

    Attributes:
        ahead: how many steps the course is ahead of the optimizer's own count, since an epoch had
            more or fewer steps on another number of ranks; None before it is known.
    """

    def __init__(self, course: Course) -> None:
        self.ahead: int | None = None
        steps = course.schedule.steps
        self._rates = np.array([course.lr(step) for step in range(steps)], keras.config.floatx())

    def __call__(self, step: Any) -> Any:
        """Return the rate of a step."""
        place = keras.ops.cast(step, "int32") + (self.ahead or 0)
        place = keras.ops.clip(place, 0, len(self._rates) - 1)
        return keras.ops.take(keras.ops.convert_to_tensor(self._rates), place)


def _optimizer(recipe: Recipe, course: Course, rates: _Rates) -> Any:
    if recipe.optimizer is not None:
        return recipe.optimizer(rates)
    return keras_optimizer(course.options, rates)
