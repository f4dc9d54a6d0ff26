"""One epoch of training and one of evaluation with TensorFlow, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.keras_state import KerasState, new_model
from hvdtrain.train.keras_recipe import KerasRecipe
from hvdtrain.train.results import Score, Sums

__all__ = ["TensorFlowLoop"]

_EVALUATION_BATCH = 1024


class TensorFlowLoop:
    """A model in training: its weights, its optimizer and its share of the data.

    Every batch of a rank has the same number of samples, so that a step is traced once. Those
    that only fill it up weigh nothing. The others weigh one over the number of samples of all
    ranks in their step, so that the sum over ranks is the gradient of the mean.

    Args:
        recipe: model, loss and optimizer.
        course: the steps.
        data: all samples; each rank takes its part of them.
    """

    def __init__(self, recipe: KerasRecipe, course: Course, data: Dataset) -> None:
        self._course = course
        self._dtype = tf.as_dtype(course.options.dtype)
        self._model = new_model(recipe, course)
        self._train, self._test = self._tensors(data.train), self._tensors(data.test)
        self._loss = recipe.build_loss()
        self._optimizer = recipe.build_optimizer(course.options.optimizer, course.options.base_lr)
        self._optimizer.build(self._model.trainable_variables)
        self.state = KerasState(self._model, self._optimizer)
        self._rows = -(-course.global_batch_size // course.topology.size)
        self._sums = tf.Variable(tf.zeros([3], tf.float64))
        self._step, self._score = tf.function(self._train_step), tf.function(self._add_score)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self._optimizer.learning_rate)

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
        for step, batch in self._course.batches(epoch, done):
            rows, taken = self._course.padded(batch, self._rows)
            self._optimizer.learning_rate = self._course.lr(step)
            self._step(tf.constant(rows), tf.constant(taken), tf.constant(len(batch)))
            if not go_on():
                break
        return self._reduced()

    def evaluate(self) -> Score:
        """Return the mean score over all test samples, each seen by one rank (collective)."""
        size, count = self._course.topology.size, len(self._test[1])
        batch = min(_EVALUATION_BATCH, -(-count // size))
        rows, taken = self._course.padded(np.arange(count), -(-count // size // batch) * batch)
        for start in range(0, len(rows), batch):
            part = slice(start, start + batch)
            self._score(tf.constant(rows[part]), tf.constant(taken[part]))
        return self._reduced().score

    def _train_step(self, rows: Any, taken: Any, count: Any) -> None:
        """Take one optimizer step on this rank's part of a global batch (collective).

        Args:
            rows: numbers of samples.
            taken: which of them count.
            count: samples of all ranks.
        """
        weights = tf.cast(taken, self._dtype) / tf.cast(count, self._dtype)
        labels = tf.gather(self._train[1], rows)
        with tf.GradientTape() as tape:
            scores = self._model(tf.gather(self._train[0], rows), training=True)
            loss = self._loss(labels, scores, sample_weight=weights)
        variables = self._model.trainable_variables
        gradients = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variables)
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self._add(labels, scores, taken)

    def _add_score(self, rows: Any, taken: Any) -> None:
        """Add the losses and hits of test samples to the sums (local)."""
        scores = self._model(tf.gather(self._test[0], rows), training=False)
        self._add(tf.gather(self._test[1], rows), scores, taken)

    def _add(self, labels: Any, scores: Any, taken: Any) -> None:
        counted = tf.cast(taken, self._dtype)
        losses = self._loss(labels, scores, sample_weight=counted)
        hits = tf.cast(tf.argmax(scores, axis=1) == labels, self._dtype) * counted
        sums = [losses, tf.reduce_sum(hits), tf.reduce_sum(counted)]
        self._sums.assign_add(tf.cast(tf.stack(sums), tf.float64))

    def _reduced(self) -> Sums:
        """Return the sums over all ranks, and begin new ones (collective)."""
        sums = hvd.allreduce(self._sums, name="score", op=hvd.Sum).numpy()
        self._sums.assign(tf.zeros_like(self._sums))
        return Sums.of(sums.tolist())

    def _tensors(self, samples: Samples) -> tuple[Any, Any]:
        return tf.constant(samples.inputs, self._dtype), tf.constant(samples.labels)
