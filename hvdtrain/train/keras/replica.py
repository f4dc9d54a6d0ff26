"""A model of Keras on each rank: what its two loops, `fit` and the tape, have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.train.keras.array_rows import ArrayRows
from hvdtrain.train.keras.state import KerasState
from hvdtrain.train.keras.tally import KerasCounts, KerasTally, summing
from hvdtrain.train.loop.course import Course
from hvdtrain.train.loop.protocol import Array
from hvdtrain.train.loop.shared_prediction import in_pieces, predict_together
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["EVALUATION_BATCH", "KerasReplica"]

EVALUATION_BATCH = 1024


class KerasReplica:
    """A model, its optimizer, and this rank's share of the data.

    Every batch of a rank has the same number of samples, so that a step is compiled once. Those
    that only fill it up weigh nothing. The others weigh one over the number of samples of all
    ranks in their step, so that the sum over ranks is the gradient of the mean.

    Args:
        recipe: model, data, loss and metrics.
        course: the steps.
        optimizer: of the model; it is built here.

    Attributes:
        model: of the recipe.
        loss: that of the recipe, as a sum over samples.
        tally: adds up losses and metrics.
        data: the training samples.
        test: the test samples; None where there are none.
        rows: samples in each batch of this rank.
    """

    def __init__(self, recipe: Recipe, course: Course, optimizer: Any) -> None:
        options = course.options
        self.course, self.model, self.optimizer = course, recipe.model, optimizer
        self.data = ArrayRows(recipe.train, options.dtype, options.seed, recipe.augment)
        self.test: ArrayRows | None = None
        if recipe.test is not None:
            self.test = ArrayRows(recipe.test, options.dtype, options.seed)
        optimizer.build(self.model.trainable_variables)
        self.loss = summing(recipe.loss)
        self.tally = KerasTally(self.loss, recipe.metrics)
        self.metrics: Mapping[str, Any] = {
            name: KerasCounts(metric) for name, metric in recipe.metrics.items()
        }
        self.test_metrics = self.metrics
        self.state = KerasState(self.model, optimizer)
        self.rows = -(-course.global_batch_size // course.topology.size)
        self.gradient_bytes = sum(
            int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize
            for v in self.model.trainable_variables
        )

    def broadcast(self) -> None:
        """Give every rank the weights and the optimizer state of rank 0 (collective)."""
        hvd.broadcast_variables(self.state.variables, root_rank=0)
        self.state.broadcast_counters()

    def agree_on_buffers(self) -> None:
        """Average what a forward pass has changed on each rank, as statistics (collective)."""
        self.state.average_statistics()

    def plan(self) -> None:
        """Buckets are in the order of the variables: there is nothing to keep."""

    def use_plan(self, plan: Any) -> None:
        """Do nothing, as in plan()."""

    def test_rows(self) -> tuple[Array, Array, int]:
        """Return this rank's test samples by number, which of them count, and how many at a time.

        Their number is a multiple of the latter.
        """
        count = 0 if self.test is None else len(self.test)
        share = -(-count // self.course.topology.size)
        batch = min(EVALUATION_BATCH, share)
        return *self.course.padded(np.arange(count), -(-share // batch) * batch), batch

    def predict(self, inputs: Array) -> Array:
        """Return the outputs for inputs [n, ...], the same on every rank (collective).

        Raises:
            UsageError: the model does not take them.
        """
        dtype = self.course.options.dtype
        cast = inputs.astype(dtype) if inputs.dtype.kind == "f" else inputs
        mine = np.arange(len(inputs))[self.course.mine(len(inputs))]
        return predict_together(
            in_pieces(mine, EVALUATION_BATCH),
            lambda rows: np.asarray(self.model.predict_on_batch(cast[rows])),
        )

    def checksums(self) -> Mapping[str, int]:
        """Return a checksum of all that must be equal on all ranks, by name (local)."""
        return self.state.checksums()
