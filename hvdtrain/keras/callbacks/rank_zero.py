"""Callbacks that write files or to the terminal, on one rank only."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.core.place import rank

__all__ = ["BestModelCheckpoint", "RankZero"]


def RankZero(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return the callback on rank 0, and one that does nothing on the others (local).

    For callbacks that only write: TensorBoard, CSVLogger, ProgbarLogger, ModelCheckpoint.

    Args:
        callback: which asks nothing of other ranks and never ends the training.
    """
    return callback if rank() == 0 else keras.callbacks.Callback()


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
