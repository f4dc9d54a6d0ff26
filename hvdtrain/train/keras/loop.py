"""Training and evaluation with Keras's `fit` and `evaluate`, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.collective import collective
from hvdtrain.data.dataset import Samples
from hvdtrain.data.sampling import Indices, rank_slice
from hvdtrain.train.keras.fit import (
    BatchDataset,
    KerasMetricSums,
    KerasMetricValue,
    SampleReader,
    StepCallback,
    StepPlanSchedule,
    compile_model,
    distributed_optimizer,
    sample_scale,
    sum_over_samples,
)
from hvdtrain.train.keras.state import KerasTrainingState
from hvdtrain.train.loop.gather import predict_on_all_ranks, split_samples
from hvdtrain.train.loop.protocol import Array, TrainingLoop
from hvdtrain.train.loop.step_plan import StepPlan, note_samples, padded
from hvdtrain.train.metrics import Totals, Values
from hvdtrain.train.recipes.recipe import Recipe

_EVALUATION_BATCH = 1024


class KerasLoop(TrainingLoop):
    """A compiled Keras model in training: its weights, its optimizer and its share of the data.

    Every batch of a rank has the same number of samples, so that a step is compiled once. Padding
    has weight 0. The other samples weigh the number of ranks over the number of samples of all
    ranks in their step, so that the average over ranks is the gradient of the mean. If ranks
    exchange weights, a rank steps on the mean of its own samples, and counts with their number.
    """

    def __init__(self, recipe: Recipe, step_plan: StepPlan) -> None:
        self._step_plan, self._recipe, self._model = step_plan, recipe, recipe.model
        self._schedule = StepPlanSchedule(step_plan)
        options = step_plan.options
        self._optimizer = self._make_optimizer()
        self._train_reader = SampleReader(recipe.train, options.dtype, options.seed, recipe.augment)
        self._in_memory = isinstance(recipe.train, Samples) and recipe.augment is None
        self._test_reader: SampleReader | None = None
        if recipe.test is not None:
            self._test_reader = SampleReader(recipe.test, options.dtype, options.seed)
        loss = sum_over_samples(recipe.loss)
        self._sums = KerasMetricSums(loss, recipe.metrics)
        self.metrics: Mapping[str, KerasMetricValue] = {
            name: KerasMetricValue(metric) for name, metric in recipe.metrics.items()
        }
        self.test_metrics = self.metrics
        self.state = KerasTrainingState(self._model, self._optimizer)
        # Samples in each batch of this rank, padding included.
        workers = options.worker_count(step_plan.topology.size)
        self._rows = -(-step_plan.global_batch_size // workers)
        self.gradient_bytes = sum(
            int(np.prod(variable.shape)) * np.dtype(variable.dtype).itemsize
            for variable in self._model.trainable_variables
        )
        self._scale = self._compile(loss)

    def _make_optimizer(self) -> Any:
        return distributed_optimizer(self._recipe, self._step_plan.options, self._schedule)

    def _compile(self, loss: Any) -> float | None:
        """Compile the model."""
        compile_model(self._model, self._optimizer, loss, self._sums)
        return sample_scale(self._optimizer, self._step_plan.topology.size)

    @property
    def lr(self) -> float:
        done = int(self._optimizer.iterations) + (self._schedule.ahead or 0)
        return self._step_plan.lr(max(done - 1, 0))

    @collective
    def broadcast(self) -> None:
        hvd.broadcast_variables(self.state.variables, root_rank=0)
        self.state.broadcast_counters()

    @collective
    def synchronize(self) -> None:
        self._optimizer.flush()
        self.state.average_statistics()

    @collective
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        first = self._step_plan.position(epoch, done)
        batches = [batch for _, batch in self._step_plan.batches(epoch, done)]
        counts = accumulate((len(batch) for batch in batches), initial=done)
        before, plan = list(counts), self._step_plan

        def note(step: int) -> None:
            batch = batches[step]
            note_samples(epoch, before[step], batch[plan.own_slice(len(batch))])

        taken = self._take_steps(epoch, first, batches, note, go_on)
        # The sums count samples in float32, which skips numbers above 2^24.
        used = sum(len(batch) for batch in batches[:taken])
        return replace(self._sums.reduce(), samples=used)

    def _take_steps(
        self,
        epoch: int,
        first: int,
        batches: Sequence[Indices],
        note: Callable[[int], None],
        go_on: Callable[[], bool],
    ) -> int:
        """Take the steps of an epoch until go_on returns False, and return their number."""
        if self._schedule.ahead is None:
            self._schedule.ahead = first - int(self._optimizer.iterations)
        data = BatchDataset(
            self._train_reader, self._step_plan, batches, self._rows, epoch, self._scale
        )
        steps = StepCallback(self._step_plan, first, note, go_on)
        self._model.fit(
            **(data.joined() if self._in_memory else {"x": data}),
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=[*self._callbacks(first, batches), steps],
        )
        return steps.taken

    def _callbacks(self, first: int, batches: Sequence[Indices]) -> list[Any]:
        """Return what `fit` calls before and after each step, before it asks go_on."""
        return []

    @collective
    def evaluate(self) -> Values:
        if self._test_reader is None:
            return {}
        samples, topology = len(self._test_reader), self._step_plan.topology
        share = -(-samples // topology.size)
        batch = min(_EVALUATION_BATCH, share)
        padded_share = -(-share // batch) * batch
        own = np.arange(samples)[rank_slice(samples, topology.rank, topology.size)]
        rows, counted = padded(own, padded_share)
        inputs, targets = self._test_reader.read(rows)
        weights = counted.astype(self._step_plan.options.dtype)
        self._model.evaluate(inputs, targets, sample_weight=weights, batch_size=batch, verbose=0)
        return self._sums.reduce().values(self.metrics)

    @collective
    def predict(self, inputs: Array) -> Array:
        dtype = self._step_plan.options.dtype
        cast = inputs.astype(dtype) if inputs.dtype.kind == "f" else inputs
        own = np.arange(len(inputs))[self._step_plan.own_slice(len(inputs))]
        return predict_on_all_ranks(
            split_samples(own, _EVALUATION_BATCH),
            lambda rows: np.asarray(self._model.predict_on_batch(cast[rows])),
        )

    def checksums(self) -> Mapping[str, int]:
        found: dict[str, int] = self.state.checksums(with_optimizer=not self._exchanges_weights)
        return found
