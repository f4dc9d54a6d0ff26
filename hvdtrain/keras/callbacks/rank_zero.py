"""Callbacks that write files or to the terminal, on one rank only."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.core import objects
from hvdtrain.core.horovod_api import rank
from hvdtrain.keras.backends.wrapping import state_of
from hvdtrain.keras.operations.values import broadcast_variables

__all__ = ["BestModelCheckpoint", "RankZero", "RestoreOnAll"]


def RankZero(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return the callback on rank 0, and one that does nothing on the others (local).

    For callbacks that only write: TensorBoard, CSVLogger, ProgbarLogger, ModelCheckpoint. With
    BackupAndRestore rank 0 reads and writes the backup, and all ranks go on from its epoch with its
    weights and optimizer; every rank needs it in `fit`.

    Args:
        callback: which asks nothing of other ranks.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return RestoreOnAll(callback)
    return callback if rank() == 0 else keras.callbacks.Callback()


class RestoreOnAll(keras.callbacks.Callback):
    """Have rank 0 keep a backup, from which all ranks go on.

    Args:
        backup: used on rank 0 only.
    """

    def __init__(self, backup: keras.callbacks.BackupAndRestore) -> None:
        super().__init__()
        self._backup: Any = backup if rank() == 0 else keras.callbacks.Callback()

    def set_params(self, params: Any) -> None:
        """Hand them on."""
        super().set_params(params)
        self._backup.set_params(params)

    def set_model(self, model: Any) -> None:
        """Hand it on."""
        super().set_model(model)
        self._backup.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore what rank 0 finds, on all ranks (collective)."""
        model: Any = self.model
        self._backup.on_train_begin(logs)
        model._initial_epoch = objects.broadcast_object(model._initial_epoch, 0, "first epoch")
        if model.built:  # in whatever epoch: a backup may be of the middle of the first one
            broadcast_variables(state_of(model), 0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, on rank 0, if it is time."""
        self._backup.on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, on rank 0, if it is time."""
        self._backup.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Forget the backup."""
        self._backup.on_train_end(logs)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the model on rank 0 whenever a metric is better than before.

    Args:
        monitor: the metric; after MetricAverageCallback that of all ranks.
        verbose: 1 says when it saves.
        mode: "min", "max", or "auto" for what the metric's name suggests.
        save_freq: "epoch", or after how many batches.
        filepath: where; may be set later.
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

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, on rank 0, if it is time."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, on rank 0, if it is time."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)
