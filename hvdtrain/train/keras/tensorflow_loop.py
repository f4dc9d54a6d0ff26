"""One epoch of training and one of evaluation with TensorFlow, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.train.keras.replica import KerasReplica
from hvdtrain.train.loop.course import Course
from hvdtrain.train.metrics.totals import Totals, Values
from hvdtrain.train.optimizers.make_keras import keras_optimizer
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["TensorFlowLoop"]


class TensorFlowLoop(KerasReplica):
    """A model in training with a tape.

    Args:
        recipe: model, data, loss and optimizer.
        course: the steps.
    """

    def __init__(self, recipe: Recipe, course: Course) -> None:
        options, make = course.options, recipe.optimizer
        base_lr = options.base_lr
        super().__init__(
            recipe, course, keras_optimizer(options, base_lr) if make is None else make(base_lr)
        )
        self._dtype = tf.as_dtype(options.dtype)
        self._step, self._score = tf.function(self._train_step), tf.function(self._add_score)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.optimizer.learning_rate)

    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        """Use the training samples that are left of an epoch; return sums (collective).

        Args:
            epoch: counted from 0.
            done: how many of its samples were used before.
            go_on: called after each optimizer step; where it returns False, on all ranks at the
                same step, that was the last one.
        """
        self.tally.reset_state()
        used = 0
        for step, batch in self.course.batches(epoch, done):
            rows, taken = self.course.padded(batch, self.rows)
            self.optimizer.learning_rate = self.course.lr(step)
            inputs, targets = map(tf.constant, self.data.read(rows, epoch))
            self._step(inputs, targets, tf.constant(taken), tf.constant(len(batch)))
            used += len(batch)
            if not go_on():
                break
        # The tally counts in float32, which skips numbers above 2^24.
        return replace(self.tally.reduced(), samples=used)

    def evaluate(self) -> Values:
        """Return loss and metrics of all test samples, each seen by one rank (collective)."""
        if self.test is None:
            return {}
        self.tally.reset_state()
        rows, taken, batch = self.test_rows()
        for start in range(0, len(rows), batch):
            part = slice(start, start + batch)
            inputs, targets = map(tf.constant, self.test.read(rows[part]))
            self._score(inputs, targets, tf.constant(taken[part]))
        return self.tally.reduced().values(self.metrics)

    def _train_step(self, inputs: Any, targets: Any, taken: Any, count: Any) -> None:
        """Take one optimizer step on this rank's part of a global batch (collective).

        Args:
            inputs: of this rank's samples.
            targets: of them.
            taken: which of them count.
            count: samples of all ranks.
        """
        weights = tf.cast(taken, self._dtype) / tf.cast(count, self._dtype)
        with tf.GradientTape() as tape:
            outputs = self.model(inputs, training=True)
            loss = self.loss(targets, outputs, sample_weight=weights)
        variables = self.model.trainable_variables
        gradients = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self._add(targets, outputs, taken)

    def _add_score(self, inputs: Any, targets: Any, taken: Any) -> None:
        """Add test samples to the sums (local)."""
        self._add(targets, self.model(inputs, training=False), taken)

    def _add(self, targets: Any, outputs: Any, taken: Any) -> None:
        self.tally.update_state(targets, outputs, tf.cast(taken, self._dtype))
