"""Training and evaluation with Keras's `fit` and `evaluate`, exact on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.collective import collective
from hvdtrain.core.gradients.exchange import Kind
from hvdtrain.core.objects import broadcast_object
from hvdtrain.data.dataset import Samples
from hvdtrain.data.sampling import Indices, rank_slice
from hvdtrain.errors import UsageError
from hvdtrain.keras.backends.types import BackendTensor
from hvdtrain.train.callbacks import Callback
from hvdtrain.train.checkpoints import TensorLibrary
from hvdtrain.train.config_file import counted
from hvdtrain.train.keras.fit import (
    BatchDataset,
    KerasCallback,
    KerasMetricSums,
    KerasMetricValue,
    SampleReader,
    StepCallback,
    StepPlanSchedule,
    distributed_optimizer,
    sum_over_samples,
)
from hvdtrain.train.loop.gather import predict_on_all_ranks, split_samples
from hvdtrain.train.loop.protocol import Array, TrainingLoop
from hvdtrain.train.loop.replica_check import array_checksum
from hvdtrain.train.loop.step_plan import StepPlan, note_samples, padded
from hvdtrain.train.metrics import Totals, Values
from hvdtrain.train.recipe import Recipe

_GENERATOR = "seed_generator_state"


class KerasTrainingState:
    """A Keras model and its optimizer, which is built."""

    tensor_library: TensorLibrary = "np"

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer

    @property
    def variables(self) -> list[Any]:
        """All variables that are equal on all ranks."""
        return [*self._model.weights, *self._optimizer.variables]

    def weights(self) -> dict[str, Array]:
        return _arrays(self._model.weights)

    def reserve(self) -> None:
        """Do nothing: Keras returns new arrays for each snapshot."""

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        arrays = {"model": self.weights(), "optimizer": self.optimizer_state()}
        own = {part: {n: a.copy() for n, a in named.items()} for part, named in arrays.items()}
        content = {**own, "counters": self.counters()}
        return lambda: content

    @collective
    def average_statistics(self, ranks: int | None = None) -> None:
        """Average the weights that are not trained, such as running means."""
        ranks = hvd.size() if ranks is None else ranks
        for number, variable in enumerate(self._model.non_trainable_weights):
            array = keras.ops.convert_to_numpy(variable)
            if array.dtype.kind == "f":
                own = array.copy() if hvd.rank() < ranks else np.zeros_like(array)
                name, factor = f"statistics.{number}", 1 / ranks
                variable.assign(hvd.allreduce(own, name, op=hvd.Sum, postscale_factor=factor))

    def checksums(self, with_optimizer: bool = True) -> dict[str, int]:
        """Return the checksums of trained weights and optimizer variables by name.

        Others, such as the statistics of batch normalization, differ between ranks.
        """
        parts = {"weight": self._model.trainable_variables}
        if with_optimizer:
            parts["optimizer"] = self._optimizer.variables
        return {
            f"{part} {v.path!r}": array_checksum(keras.ops.convert_to_numpy(v))
            for part, variables in parts.items()
            for v in variables
        }

    def counters(self) -> list[int]:
        """Return the count of each SeedGenerator of the model, as Dropout has one."""
        return [int(keras.ops.convert_to_numpy(state)[1]) for state in self._generators()]

    @collective
    def broadcast_counters(self) -> None:
        """Copy the counters of rank 0 to every rank; each keeps its own seeds."""
        self._set_counters(broadcast_object(self.counters(), name="counters"))

    def load(self, content: Mapping[str, Any]) -> None:
        saved, counters = content["optimizer"], content["counters"]
        if len(counters) != len(self._generators()):
            raise ValueError(f"it has {len(counters)} random generators")
        for variable in self._optimizer.variables:
            shape = saved[variable.path].shape
            if shape != tuple(variable.shape):
                raise ValueError(f"its {variable.path} has shape {shape}")
        self.load_weights(content)
        self.load_optimizer(saved)
        self._set_counters(counters)

    def load_weights(self, content: Mapping[str, Any]) -> None:
        for variable in self._model.weights:
            variable.assign(content["model"][variable.path])

    def optimizer_state(self) -> dict[str, Array]:
        return _arrays(self._optimizer.variables)

    def load_optimizer(self, saved: Mapping[str, Array]) -> None:
        for variable in self._optimizer.variables:
            variable.assign(saved[variable.path])

    def _generators(self) -> list[Any]:
        """Return the states [seed, counter] of the model's SeedGenerators, in the model's order."""
        return [v for v in self._model.variables if v.name == _GENERATOR]

    def _set_counters(self, counters: Sequence[int]) -> None:
        for state, counter in zip(self._generators(), counters, strict=True):
            array = keras.ops.convert_to_numpy(state).copy()
            array[1] = counter
            state.assign(array)


def _arrays(variables: Sequence[Any]) -> dict[str, Array]:
    return {v.path: keras.ops.convert_to_numpy(v) for v in variables}


_EVALUATION_BATCH = 1024


def _counted_samples(x: BackendTensor, y: BackendTensor, weights: BackendTensor) -> BackendTensor:
    """Return the number of samples of a batch that are not padding."""
    counted: BackendTensor = keras.ops.sum(keras.ops.cast(keras.ops.greater(weights, 0), "float32"))
    return counted


class KerasLoop(TrainingLoop):
    """A compiled Keras model in training: its weights, its optimizer and its share of the data.

    Every batch of a rank has the same number of samples, so that a step is compiled once. Padding
    has weight 0. It would enter the statistics of BatchNormalization: with that layer there is
    none. Samples weigh the number of ranks over the number of samples of all ranks in their step,
    so that the average over ranks is the gradient of the mean. If ranks exchange weights, a rank
    steps on the mean of its own samples, and counts with their number.
    """

    def __init__(self, recipe: Recipe, step_plan: StepPlan) -> None:
        self._step_plan, self._recipe, self._model = step_plan, recipe, recipe.model
        layers, normalization = self._model._flatten_layers(), keras.layers.BatchNormalization
        # A frozen one takes its moving statistics.
        self._pads = not any(isinstance(each, normalization) and each.trainable for each in layers)
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
        self.gradient_bytes = sum(
            int(np.prod(variable.shape)) * np.dtype(variable.dtype).itemsize
            for variable in self._model.trainable_variables
        )
        self._scale = self._compile(loss)
        self._steps: StepCallback | None = None

    def _make_optimizer(self) -> Any:
        return distributed_optimizer(self._recipe, self._step_plan.options, self._schedule)

    def _compile(self, loss: Any) -> float | None:
        """Compile the model, and return the factor of sample weights that BatchDataset takes."""
        self._model.compile(self._optimizer, loss, weighted_metrics=[self._sums])
        settings = self._optimizer.hvdtrain_reduction.settings
        exchange = settings.make_exchange()
        if exchange.kind is Kind.WEIGHTS and exchange.takes_samples:
            self._optimizer.sample_weight = _counted_samples
        return None if settings.weights else float(self._step_plan.topology.size)

    @property
    def lr(self) -> float:
        done = int(self._optimizer.iterations) + (self._schedule.ahead or 0)
        return self._step_plan.lr(max(done - 1, 0))

    @property
    def _rows(self) -> int | None:
        """Samples in each batch of this rank, padding included; None: there is none."""
        plan = self._step_plan
        if not self._pads:
            return None
        return -(-plan.global_batch_size // plan.options.worker_count(plan.topology.size))

    def own_loss(self) -> float:
        return math.nan if self._steps is None else self._steps.loss

    def _callback(self, given: Any) -> Callback:
        if isinstance(given, keras.callbacks.Callback):
            return KerasCallback(given, self._model)
        return super()._callback(given)

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
        plan = self._step_plan
        batches = [batch for _, batch in plan.batches(epoch, done)]
        ranks = plan.options.worker_count(plan.topology.size)
        if not self._pads and batches and len(batches[-1]) < ranks:
            raise UsageError(
                f"the last batch of an epoch has {counted(len(batches[-1]), 'sample')} for {ranks} "
                "ranks, and BatchNormalization needs one on each: give another --global-batch-size"
            )
        before = list(accumulate((len(batch) for batch in batches), initial=done))

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
        self._steps = steps = StepCallback(self._step_plan, first, note, go_on)
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
