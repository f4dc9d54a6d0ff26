"""Horovod's callbacks for `fit` on several ranks, and RankZero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context, objects
from hvdtrain.core.horovod_api import rank, size
from hvdtrain.errors import MismatchError
from hvdtrain.keras.backends.distributed import training_state
from hvdtrain.keras.backends.operations import broadcast_variables
from hvdtrain.keras.backends.sharding import StateVariable
from hvdtrain.keras.backends.types import KerasVariable, Logs, to_array

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "RankZero",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcast the weights and the optimizer's state of one rank (collective, in fit).

    That happens at the start of `fit`. On TensorFlow a model without an Input is built by its
    first batch only, and gets them before its second one. States of random number generators are
    not broadcast.

    Args:
        root_rank: rank that sends its state.
        device: ignored.
        local_variables: variable, or several, that are not broadcast.

    Raises:
        MismatchError: models differ between ranks (at the start of fit).
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: KerasVariable | Sequence[KerasVariable] | None = None,
    ) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        local: Any = [] if local_variables is None else local_variables
        is_variable = isinstance(local, keras.Variable)
        self.local_variables: list[KerasVariable] = [local] if is_variable else list(local)
        self.broadcast_done = False

    def register_local_var(self, var: KerasVariable) -> None:
        """Do not broadcast a variable (local)."""
        self.local_variables.append(var)

    @collective
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Broadcast if the model is built (collective)."""
        self.broadcast_done = False
        self._broadcast_once()

    @collective
    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Broadcast if the model was not built before (collective)."""
        self._broadcast_once()

    @collective
    def on_train_end(self, logs: Logs | None = None) -> None:
        """Broadcast if there was one batch only, which built the model (collective)."""
        self._broadcast_once()

    @collective
    def _broadcast_once(self) -> None:
        model = self.model
        # A model whose class has no `build` is marked as built before it has weights.
        if self.broadcast_done or not (model.built and model.weights):
            return
        local = {id(variable) for variable in self.local_variables}
        state = [variable for variable in training_state(model) if id(variable) not in local]
        broadcast_variables(state, self.root_rank)
        self.broadcast_done = True


# The keys that lead to a metric, its value, and the number of samples that this is the mean of.
_Path: TypeAlias = tuple[Any, ...]
_Metrics: TypeAlias = dict[_Path, tuple[HostArray, float]]
_COMPLEX, _NO_NUMBERS = "c", "OSUMm"  # kinds of numpy


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replace the logs of each epoch by their averages over the ranks, weighted by samples.

    It must come before callbacks that use the logs: EarlyStopping, ReduceLROnPlateau and
    ModelCheckpoint then decide the same on every rank. A metric that only some ranks have is
    averaged over them, and is logged on all ranks. Arrays are averaged element by element, and
    numbers in dicts as others; what is no number stays that of the rank. Averages are exact for
    means over samples.

    Args:
        device: ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._training_samples: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Forget the last epoch."""
        self._training_samples = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Remember the number of training samples, before validation resets it."""
        self._training_samples = self._samples()

    @collective
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Average the logs over the ranks (collective)."""
        last = self._samples()
        trained = last if self._training_samples is None else self._training_samples
        own: _Metrics = {}
        for path, value in _numbers((), logs or {}):
            own[path] = value, last if str(path[0]).startswith("val_") else trained
        averages = _averages(objects.allgather_object(own, "metrics of an epoch"))
        for path, average in averages.items() if logs is not None else ():
            inner: Any = logs
            for key in path[:-1]:
                if not isinstance(inner.get(key), dict):
                    inner[key] = {}
                inner = inner[key]
            inner[path[-1]] = average

    def _samples(self) -> float:
        """Return the number of samples that the loss is the mean of."""
        model = self.model
        losses = [metric for metric in model.metrics if metric.name == "loss"]
        counts = [float(metric.count) for metric in losses if hasattr(metric, "count")]
        return counts[0] if counts and counts[0] > 0 else 1.0


def _numbers(path: _Path, value: Any) -> Iterator[tuple[_Path, HostArray]]:
    """Yield what can be averaged in a value, as float64 or complex128."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers((*path, key), item)
        return
    try:
        array = to_array(value)
        kind = array.dtype.kind
        if kind not in _NO_NUMBERS:  # others are types of ml_dtypes
            yield path, array.astype(np.complex128 if kind == _COMPLEX else np.float64)
    except (TypeError, ValueError, RuntimeError):  # as for lists of different lengths
        return


def _averages(metrics_of_ranks: Sequence[_Metrics]) -> dict[_Path, Any]:
    """Return sum_r(n_r value_r) / sum_r(n_r) of each metric, over the ranks that have it."""
    paths = dict.fromkeys(path for metrics in metrics_of_ranks for path in metrics)
    averages: dict[_Path, Any] = {}
    for path in paths:
        found = {
            place: metrics[path]
            for place, metrics in enumerate(metrics_of_ranks)
            if path in metrics
        }
        first = next(iter(found))
        for place, (value, _) in found.items():
            if value.shape != found[first][0].shape:
                raise MismatchError(
                    f"{_title(path)} has shape {value.shape} on rank {place}, but "
                    f"{found[first][0].shape} on rank {first}: log the same on every rank"
                )
        if any(other[: len(path)] == path for other in paths if other != path):
            raise MismatchError(
                f"{_title(path)} is a number on rank {first}, but a dict on another rank: log the "
                "same on every rank"
            )
        values, samples = zip(*found.values(), strict=True)
        average = np.average(np.stack(values), axis=0, weights=samples)
        averages[path] = average if average.ndim else average.item()
    return averages


def _title(path: _Path) -> str:
    title = context.current().topology.title
    return f"{title} MetricAverageCallback: metric {'/'.join(map(str, path))!r}"


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to initial_lr * multiplier(epoch) and log it as `lr`.

    Args:
        initial_lr: learning rate for the batch of all ranks together.
        multiplier: function of the epoch; or a number c for c ** (epoch - start_epoch).
        start_epoch: first epoch in which the learning rate is set.
        end_epoch: first epoch after that in which it is not set; None for no end.
        staircase: set it at the beginning of each epoch only; else before every batch, with a
            fractional epoch.
        momentum_correction: scale the velocities of SGD once by new / old rate, because they
            accumulate updates, not gradients.
        steps_per_epoch: batches in an epoch of a rank, needed without `staircase` if Keras does not
            know their number.

    Raises:
        ValueError: there is no initial_lr; or, when fit begins, the number of batches is not
            known, or the optimizer has a learning rate schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required")
        self.initial_lr, self.staircase = initial_lr, staircase
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._epoch, self._steps = 0, 1

    @collective
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the number of batches in an epoch on the rank that has most (collective)."""
        optimizer = _with_learning_rate(self.model.optimizer)
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise ValueError(
                f"{type(self).__name__} sets the learning rate, but the optimizer has a "
                "learning rate schedule: pass a number to the optimizer instead"
            )
        if self.staircase:
            return
        own = self.steps_per_epoch or self.params.get("steps")
        gathered = objects.allgather_object(own, "batches of an epoch")
        self._steps = 0 if None in gathered else max(gathered)
        if not self._steps:
            raise ValueError(
                f"{type(self).__name__} needs the number of batches per epoch: pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the learning rate if it is due."""
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.multiplier(self._epoch + batch / self._steps))
        elif batch == 0:
            self._set(self.multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, multiplier: float) -> None:
        optimizer = _with_learning_rate(self.model.optimizer)
        old, new = float(optimizer.learning_rate), self.initial_lr * multiplier
        optimizer.learning_rate = new
        moves = isinstance(optimizer, keras.optimizers.SGD) and optimizer.built
        if self.momentum_correction and old > 0.0 and new != old and moves:
            for velocity in optimizer.momentums if optimizer.momentum else ():
                if isinstance(velocity, StateVariable):  # whose memory the ranks share
                    velocity.scale(new / old)
                else:
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increase the learning rate linearly from initial_lr / size to initial_lr, batch by batch.

    Before batch i of epoch e, with s batches in an epoch, it is
    initial_lr / size * ((e + (i + 1) / s) * (size - 1) / warmup_epochs + 1).

    Args:
        initial_lr: final learning rate, for the batch of all ranks together.
        warmup_epochs: number of epochs until then.
        momentum_correction: see LearningRateScheduleCallback.
        steps_per_epoch: see LearningRateScheduleCallback.
        verbose: 1 makes rank 0 print the final learning rate.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            return warmup_multiplier(epoch, warmup_epochs, self._steps, size())

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the learning rate, and print the final one."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and epoch + 1 == self.end_epoch:
            reached = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {reached:g}.")


def warmup_multiplier(epoch: float, warmup_epochs: int, steps: int, ranks: int) -> float:
    """Return the multiplier of the learning rate before a batch."""
    epoch += 1.0 / steps  # a whole number for the last batch of an epoch
    return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks


def _with_learning_rate(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that has the learning rate: itself, or that in a LossScaleOptimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def RankZero(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return the callback on rank 0, and one that does nothing on other ranks (local).

    It is for callbacks that only write: TensorBoard, CSVLogger, ProgbarLogger, ModelCheckpoint.
    With BackupAndRestore rank 0 reads and writes the backup, and all ranks continue from its epoch
    with its weights and optimizer; every rank needs it in `fit`.

    Args:
        callback: callback that does not communicate.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return SharedBackup(callback)
    return callback if rank() == 0 else keras.callbacks.Callback()


class SharedBackup(keras.callbacks.Callback):  # type: ignore[misc]
    """Keep a backup on rank 0, from which all ranks continue (in fit)."""

    def __init__(self, backup: keras.callbacks.BackupAndRestore) -> None:
        super().__init__()
        self.backup = backup if rank() == 0 else keras.callbacks.Callback()

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        self.backup.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.backup.set_model(model)

    @collective
    def on_train_begin(self, logs: Logs | None = None) -> None:
        model = self.model
        self.backup.on_train_begin(logs)
        model._initial_epoch = objects.broadcast_object(model._initial_epoch, 0, "first epoch")
        if model.built:  # in any epoch: the backup may be from the middle of the first one
            broadcast_variables(training_state(model), 0)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.backup.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.backup.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.backup.on_train_end(logs)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Save the model on rank 0 whenever a metric is better than before.

    Args:
        monitor: name of the metric; after MetricAverageCallback it is the average over the ranks.
        verbose: 1 prints a line for each save.
        mode: "min", "max", or "auto" to derive it from the name of the metric.
        save_freq: "epoch", or a number of batches.
        filepath: path of the file, which may be set later.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best.keras",
    ) -> None:
        super().__init__(
            filepath=filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save on rank 0 if that is due."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save on rank 0 if that is due."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)


@dataclass
class SaveSchedule:
    """The batches after which a callback saves, counted as ModelCheckpoint does."""

    every: int
    seen: int
    last: int | None

    def saves_after(self, batch: int) -> bool:
        """Count the batches up to this one; return whether the callback saves after it."""
        begins = self.last is None or batch <= self.last
        self.seen += batch + 1 if begins or self.last is None else batch - self.last
        self.last = batch
        if self.seen < self.every:
            return False
        self.seen = 0
        return True


def save_schedules(callbacks: Sequence[keras.callbacks.Callback]) -> list[SaveSchedule]:
    """Return the schedules of those callbacks that save after batches."""
    inner = [each.backup if isinstance(each, SharedBackup) else each for each in callbacks]
    kinds = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    return [
        SaveSchedule(each.save_freq, each._batches_seen_since_last_saving, each._last_batch_seen)
        for each in inner
        if isinstance(each, kinds) and isinstance(each.save_freq, int)
    ]
