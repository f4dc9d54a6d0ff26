"""Arguments of Keras's `fit`: batches of this rank, callbacks, metrics, learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.collective import collective
from hvdtrain.data.dataset import Samples, augmented, is_stream
from hvdtrain.data.sampling import (
    Indices,
    sample_seed,
    seed_generators,
    step_seed,
)
from hvdtrain.errors import UnsupportedError, UsageError
from hvdtrain.train.callbacks import Callback, CallbackState
from hvdtrain.train.loop.protocol import Array
from hvdtrain.train.loop.step_plan import StepPlan, padded
from hvdtrain.train.metrics import Counts, Totals
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe

# Each update of these adds sums over the batch to their variables, which start at zero.
_SUMMABLE = (
    keras.metrics.Mean,  # the base of accuracies, errors, losses and similarities
    keras.metrics.Sum,
    keras.metrics.TruePositives,
    keras.metrics.TrueNegatives,
    keras.metrics.FalsePositives,
    keras.metrics.FalseNegatives,
    keras.metrics.Precision,
    keras.metrics.Recall,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.AUC,
    keras.metrics.FBetaScore,
    keras.metrics.IoU,
)


def require_adding_metrics(metrics: Mapping[str, Any]) -> None:
    """Check that the variables of metrics can be summed over ranks."""
    for name, metric in metrics.items():
        if not isinstance(metric, _SUMMABLE) and not getattr(metric, "adds_up", False):
            raise UsageError(
                f"metric {name!r} is a {type(metric).__name__}, whose variables are not known to "
                "add up over ranks: derive it from keras.metrics.Mean, or, if each update only "
                "adds sums over the batch to them, give its class the attribute adds_up = True"
            )


def sum_over_samples(loss: Any) -> Any:
    """Return a loss like this one that sums over samples, each times its sample_weight."""
    return type(loss).from_config({**loss.get_config(), "reduction": "sum"})


class KerasMetricSums(keras.metrics.Metric):  # type: ignore[misc]
    """Adds up the losses of samples with a weight, their number, and metrics of them.

    A sample with a weight counts once, whatever the weight is.
    """

    def __init__(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        require_adding_metrics(metrics)
        super().__init__(name="tally")
        self._loss = loss
        self._inner = list(metrics.values())
        self._names = list(metrics)
        self._sums = self.add_weight(shape=(2,), initializer="zeros", name="sums")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ops = keras.ops
        # At least float32, so that sums of half types keep their precision.
        counted = ops.cast(ops.reshape(sample_weight, [-1]) > 0, self._sums.dtype)
        losses = self._loss(y_true, y_pred, sample_weight=counted)
        for metric in self._inner:
            metric.update_state(y_true, y_pred, sample_weight=counted)
        self._sums.assign_add(ops.stack([ops.cast(losses, self._sums.dtype), ops.sum(counted)]))

    def result(self) -> Any:
        """Return the number of samples."""
        return self._sums[1]

    def reset_state(self) -> None:
        self._sums.assign(keras.ops.zeros(self._sums.shape, self._sums.dtype))
        for metric in self._inner:
            metric.reset_state()

    @collective
    def reduce(self) -> Totals:
        arrays = [_flat([self._sums]), *(_flat(metric.variables) for metric in self._inner)]
        sums = hvd.allreduce(np.concatenate(arrays), name="score", op=hvd.Sum)
        (loss, samples), *counts = np.split(sums, np.cumsum([len(a) for a in arrays])[:-1])
        return Totals(int(samples), float(loss), dict(zip(self._names, counts, strict=True)))


class KerasMetricValue:
    """Computes a Keras metric from the sums of its variables."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.higher_is_better = getattr(metric, "_direction", "up") != "down"

    def value(self, counts: Counts) -> Any:
        """Return the metric for sums of its variables, a number or a nested list."""
        if type(self._metric).result is keras.metrics.Mean.result:  # subclasses may take its root
            total, count = counts
            return float(total / count) if count else 0.0
        before = [keras.ops.convert_to_numpy(v) for v in self._metric.variables]
        starts = np.cumsum([array.size for array in before])[:-1]
        for variable, part in zip(self._metric.variables, np.split(counts, starts), strict=True):
            variable.assign(part.reshape(tuple(variable.shape)))
        value = keras.ops.convert_to_numpy(self._metric.result()).tolist()
        for variable, array in zip(self._metric.variables, before, strict=True):
            variable.assign(array)
        return value


def _flat(variables: Any) -> Any:
    arrays = [keras.ops.convert_to_numpy(v).astype(np.float64).reshape(-1) for v in variables]
    return np.concatenate(arrays)


# Names of one-dimensional parameters in Keras's layers.
_NOT_DECAYED = ["bias", "beta", "gamma"]


def plain_optimizer(recipe: Recipe, options: TrainOptions, lr: Any) -> Any:
    """Return the optimizer of a recipe or of the options.

    Those of the options clip the gradient by its global norm and, as Keras does, subtract the
    weight decay times the learning rate from the weights before the step. LAMB's decay is outside
    its ratio, and excludes biases and normalization.
    """
    if recipe.optimizer is not None:
        return recipe.optimizer(lr)
    optimizers, decay = keras.optimizers, options.used_weight_decay
    common = {
        "learning_rate": lr,
        # None saves a pass over the weights; but AdamW does not accept None.
        "weight_decay": decay if decay or options.optimizer == "adamw" else None,
        "global_clipnorm": options.clip_norm,
        "name": "optimizer",
    }
    match options.optimizer:
        case "adam":
            return optimizers.Adam(epsilon=1e-8, **common)
        case "adamw":
            return optimizers.AdamW(epsilon=1e-8, **common)
        case "lamb":
            optimizer = optimizers.Lamb(epsilon=1e-6, **common)
            optimizer.exclude_from_weight_decay(var_names=_NOT_DECAYED)
            return optimizer
    return optimizers.SGD(momentum=options.momentum, **common)


class SampleReader:
    """Reads samples from arrays or from a map-style data set."""

    def __init__(self, data: Any, dtype: str, seed: int, augment: Any = None) -> None:
        if is_stream(data):
            raise UsageError(
                "with Keras the samples of a recipe must have len() and [index], "
                f"but {type(data).__name__} does not: use --framework torch for streams"
            )
        self._data, self._dtype, self._seed, self._augment = data, dtype, seed, augment

    def __len__(self) -> int:
        return len(self._data)

    def read(self, rows: Indices, epoch: int = 0) -> tuple[Any, Any]:
        """Return the inputs [n, ...] and the targets [n, ...] of samples."""
        if isinstance(self._data, Samples) and self._augment is None:
            inputs, targets = self._data.inputs[rows], self._data.labels[rows]
        else:
            pairs = [self._sample(int(index), epoch) for index in rows]
            inputs, targets = (np.stack(column) for column in zip(*pairs, strict=True))
        return self._cast(inputs), self._cast(targets)

    def _sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        if not isinstance(self._data, Samples):
            seed_generators(sample_seed(self._seed, epoch, index))
        sample = self._data[index]
        inputs, targets = augmented(sample, self._augment, self._seed, epoch, index)
        return np.asarray(inputs), np.asarray(targets)

    def _cast(self, array: Any) -> Any:
        return array.astype(self._dtype) if array.dtype.kind == "f" else array


class BatchDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of this rank in one epoch, padded to `rows` if given, and read one by one."""

    def __init__(
        self,
        reader: SampleReader,
        step_plan: StepPlan,
        batches: Sequence[Indices],
        rows: int | None,
        epoch: int,
        scale: float | None = 1.0,
    ) -> None:
        super().__init__()
        self._reader, self._step_plan, self._epoch = reader, step_plan, epoch
        self._batches, self._rows, self._scale = batches, rows, scale

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> tuple[Array, Array, Array]:
        """Return inputs [rows, ...], targets [rows, ...] and sample weights [rows]."""
        rows, counted = self._padded(self._batches[number])
        inputs, targets = self._reader.read(rows, self._epoch)
        return inputs, targets, self._weights(self._batches[number], counted)

    def _padded(self, batch: Indices) -> tuple[Indices, Array]:
        own = batch[self._step_plan.own_slice(len(batch))]
        return padded(own, len(own) if self._rows is None else self._rows)

    def _weights(self, batch: Indices, counted: Array) -> Array:
        """Return the weights of this rank's samples, [rows]; padding has weight 0."""
        factor = 1 / max(1, counted.sum()) if self._scale is None else self._scale / len(batch)
        weights: Array = (factor * counted).astype(self._step_plan.options.dtype)
        return weights

    def joined(self) -> dict[str, Array | int]:
        """Return all batches in one piece as arguments of `fit`, which is faster that way."""
        parts = [self._padded(batch) for batch in self._batches]
        inputs, targets = self._reader.read(np.concatenate([rows for rows, _ in parts]))
        pairs = zip(self._batches, parts, strict=True)
        weights = np.concatenate([self._weights(batch, counted) for batch, (_, counted) in pairs])
        return {"x": inputs, "y": targets, "sample_weight": weights, "batch_size": len(parts[0][0])}


class StepCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Seeds the random generators before each step, and asks after it whether to continue."""

    def __init__(
        self,
        step_plan: StepPlan,
        first: int,
        note: Callable[[int], None],
        go_on: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._step_plan, self._first, self._note, self._go_on = step_plan, first, note, go_on
        self.taken, self.loss = 0, math.nan

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Seed for this step and rank: on torch, Dropout draws from torch's own generator."""
        seed, rank = self._step_plan.options.seed, self._step_plan.topology.rank
        seed_generators(step_seed(seed, self._first + batch, rank))
        self._note(batch)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Stop `fit` after this step if `go_on` returns False."""
        self.taken, self.loss = self.taken + 1, float((logs or {}).get("loss", math.nan))
        if not self._go_on():
            self.model.stop_training = True


# Moments of Keras at which a run does not call callbacks.
_UNCALLED = (
    *("on_train_batch_begin", "on_batch_begin", "on_test_begin"),
    *("on_test_batch_begin", "on_test_batch_end"),
)


class KerasCallback(Callback):
    """A callback of Keras, called at the moments of a run, which calls `fit` for parts of it."""

    def __init__(self, inner: keras.callbacks.Callback, model: Any) -> None:
        for name in _UNCALLED:  # on_test_end may undo what on_test_begin has done
            method = getattr(getattr(inner, name), "__func__", None)
            if method is not getattr(keras.callbacks.Callback, name):
                raise UsageError(
                    f"callback {type(inner).__name__} needs {name}, which is not called here: "
                    "write a hvdtrain.train.Callback, or leave it out"
                )
        self._inner, self._model = inner, model
        inner.set_model(model)

    def on_train_begin(self, state: CallbackState) -> None:
        self._call("on_train_begin", state)

    def on_epoch_begin(self, state: CallbackState) -> None:
        self._call("on_epoch_begin", state, state.epoch - 1)

    def on_train_batch_end(self, state: CallbackState) -> None:
        self._call("on_train_batch_end", state, state.step - 1)

    def on_test_end(self, state: CallbackState) -> None:
        self._call("on_test_end", replace(state, train=state.test, test={}))

    def on_epoch_end(self, state: CallbackState) -> None:
        self._call("on_epoch_end", state, state.epoch - 1)

    def on_train_end(self, state: CallbackState) -> None:
        self._call("on_train_end", state)

    def _call(self, moment: str, state: CallbackState, *number: int) -> None:
        logs = {**state.train, **{f"val_{name}": value for name, value in state.test.items()}}
        before, self._model.stop_training = self._model.stop_training, False  # a pause sets it
        getattr(self._inner, moment)(*number, logs)
        self.stop |= self._model.stop_training
        self._model.stop_training = before


class StepPlanSchedule(
    keras.optimizers.schedules.LearningRateSchedule  # type: ignore[misc]
):
    """The learning rates of a step plan, as part of the compiled step."""

    def __init__(self, step_plan: StepPlan) -> None:
        self.ahead: int | None = None
        rates = [step_plan.lr(step) for step in range(step_plan.steps)]
        self._rates = np.array(rates, keras.config.floatx())

    def __call__(self, step: Any) -> Any:
        index = keras.ops.cast(step, "int32") + (self.ahead or 0)
        index = keras.ops.clip(index, 0, len(self._rates) - 1)
        return keras.ops.take(keras.ops.convert_to_tensor(self._rates), index)


def distributed_optimizer(
    recipe: Recipe, options: TrainOptions, schedule: keras.optimizers.schedules.LearningRateSchedule
) -> Any:
    """Return the optimizer of a recipe or of the options, distributed and built."""
    plain = plain_optimizer(recipe, options, schedule)
    exchange = options.make_exchange()
    try:
        optimizer = hvd.DistributedOptimizer(
            plain, exchange=exchange, sharded=bool(options.shard_optimizer)
        )
    except UnsupportedError as error:
        raise UsageError(f"--shard-optimizer: {error}") from error
    except ValueError as error:
        if exchange is None:
            raise
        raise UsageError(f"--exchange {options.exchange}: {error}") from error
    weights = optimizer.hvdtrain_reduction.weights
    if weights is not None:
        weights.flush_in_fit = False  # a run calls `fit` for a part of an epoch, and flushes itself
    optimizer.build(recipe.model.trainable_variables)
    return optimizer
