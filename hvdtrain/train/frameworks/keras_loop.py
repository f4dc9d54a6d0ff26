"""Epochs of `fit` and `evaluate`, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.keras_state import KerasState, new_model
from hvdtrain.train.keras_recipe import KerasRecipe
from hvdtrain.train.results import Score, Sums

__all__ = ["KerasLoop"]

_EVALUATION_BATCH = 1024


class KerasLoop:
    """A compiled model in training: its weights, its optimizer and its share of the data.

    Every batch of a rank has the same number of samples, so that a step is compiled once. Those
    that only fill it up weigh nothing. The others weigh one over the number of samples of all
    ranks in their step, so that the sum over ranks is the gradient of the mean.

    Args:
        recipe: model, loss and optimizer.
        course: the steps.
        data: all samples; each rank takes its part of them.
    """

    def __init__(self, recipe: KerasRecipe, course: Course, data: Dataset) -> None:
        self._course, self._data = course, data
        self._model = new_model(recipe, course)
        self._schedule = _WarmUp(course)
        optimizer = hvd.DistributedOptimizer(
            recipe.build_optimizer(course.options.optimizer, self._schedule), op=hvd.Sum
        )
        optimizer.build(self._model.trainable_variables)
        self._optimizer = optimizer
        self._tally = _Tally(recipe.build_loss())
        self._model.compile(optimizer, recipe.build_loss(), weighted_metrics=[self._tally])
        self.state = KerasState(self._model, optimizer)
        self._rows = -(-course.global_batch_size // course.topology.size)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self._schedule(int(self._optimizer.iterations) - 1))

    def broadcast(self) -> None:
        """Give every rank the weights and the optimizer state of rank 0 (collective)."""
        hvd.broadcast_variables(self.state.variables, root_rank=0)

    def train_epoch(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Sums:
        """Use every training sample that is left once; return sums while learning (collective).

        Args:
            epoch: counted from 0.
            done: how many of its samples were used before.
            go_on: called after each optimizer step; where it returns False, on all ranks at the
                same step, that was the last one.
        """
        batches = list(self._course.batches(epoch, done))
        parts = [self._course.padded(batch, self._rows) for _, batch in batches]
        counts = np.repeat([len(batch) for _, batch in batches], self._rows)
        self._model.fit(
            *self._samples(self._data.train, np.concatenate([rows for rows, _ in parts])),
            sample_weight=np.concatenate([taken for _, taken in parts]) / counts,
            batch_size=self._rows,
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[_Steps(go_on)],
        )
        return self._tally.reduced()

    def evaluate(self) -> Score:
        """Return the mean score over all test samples, each seen by one rank (collective)."""
        size, count = self._course.topology.size, len(self._data.test)
        batch = min(_EVALUATION_BATCH, -(-count // size))
        rows, taken = self._course.padded(np.arange(count), -(-count // size // batch) * batch)
        self._model.evaluate(
            *self._samples(self._data.test, rows),
            sample_weight=taken.astype(self._course.options.dtype),
            batch_size=batch,
            verbose=0,
        )
        return self._tally.reduced().score

    def _samples(self, samples: Samples, rows: Any) -> tuple[Any, Any]:
        return samples.inputs[rows].astype(self._course.options.dtype), samples.labels[rows]


class _Steps(keras.callbacks.Callback):
    """Asks after each step whether to go on."""

    def __init__(self, go_on: Callable[[], bool]) -> None:
        super().__init__()
        self._go_on = go_on

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Have `fit` return after this step where that is the answer."""
        if not self._go_on():
            self.model.stop_training = True


class _WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of a course, as part of the compiled step."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def __call__(self, step: Any) -> Any:
        """Return schedule.warmup_lr() of a step."""
        ops, dtype = keras.ops, keras.config.floatx()
        base, target = self._course.options.base_lr, self._course.target_lr
        warmup = self._course.options.warmup_epochs
        if base == target or not warmup:
            return ops.cast(target, dtype)
        done = (ops.cast(step, dtype) + 1) / self._course.steps_per_epoch
        return ops.where(done < warmup, base + (target - base) * done / warmup, target)


class _Tally(keras.metrics.Metric):
    """Adds up the losses and the hits of samples with a weight, and their number."""

    def __init__(self, loss: Any) -> None:
        super().__init__(name="tally")
        self._loss = loss
        self._sums = self.add_weight(shape=(3,), initializer="zeros", name="sums")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        ops = keras.ops
        labels = ops.reshape(y_true, [-1])
        taken = ops.cast(ops.reshape(sample_weight, [-1]) > 0, y_pred.dtype)
        hits = ops.cast(ops.equal(ops.argmax(y_pred, axis=1), labels), y_pred.dtype) * taken
        losses = self._loss(labels, y_pred, sample_weight=taken)
        self._sums.assign_add(ops.stack([losses, ops.sum(hits), ops.sum(taken)]))

    def result(self) -> Any:
        """Return the number of samples."""
        return self._sums[2]

    def reduced(self) -> Sums:
        """Return the sums over all ranks (collective)."""
        sums = keras.ops.convert_to_numpy(self._sums).astype(np.float64)
        return Sums.of(hvd.allreduce(sums, name="score", op=hvd.Sum).tolist())
