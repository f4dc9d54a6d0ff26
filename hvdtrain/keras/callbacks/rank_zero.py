"""Callbacks that write files or to the terminal on rank 0 only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvdtrain.collective import collective
from hvdtrain.core import objects
from hvdtrain.core.horovod_api import rank
from hvdtrain.keras.backends.distributed import training_state
from hvdtrain.keras.backends.operations import broadcast_variables
from hvdtrain.keras.backends.types import KerasModel, Logs

__all__ = ["BestModelCheckpoint", "RankZero", "SharedBackup"]


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

    def set_model(self, model: KerasModel) -> None:
        super().set_model(model)
        self.backup.set_model(model)

    @collective
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Restore the backup of rank 0 on all ranks."""
        model: KerasModel = self.model
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
