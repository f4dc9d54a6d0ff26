"""Callbacks that keep an elastic state up to date in `fit`."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.core.elastic import ObjectState
from hvdtrain.keras.backends.types import Logs

__all__ = ["CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit a state after every `batches_per_commit` batches, and at the end of each epoch.

    Put it behind the callbacks that update the state.

    Args:
        state: state that is committed.
        batches_per_commit: number of batches; a rank that is lost costs as many at most.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit must be at least 1, got {batches_per_commit}")
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start to count batches (local)."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Commit if that is due (as `state.commit`)."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Commit (as `state.commit`)."""
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set `state.batch` to the number of batches that are done of the epoch.

    The first epoch of a `fit` that starts with a state in the middle of an epoch has as many
    batches less, if Keras knows its number of batches.

    Args:
        state: state with the attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before, self._stops = 0, False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note how many batches were done before (local)."""
        steps = self.params.get("steps")
        # The last commit may be that of the last batch, and ranks that join leave fewer batches: an
        # epoch cannot have none.
        self.state.batch = 0 if steps is None else min(self.state.batch, steps - 1)
        self._before, self._stops = self.state.batch, False

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count the batch, and end the epoch if those that were left are done (local)."""
        self.state.batch = self._before + batch + 1
        if self._before and self.state.batch == self.params["steps"]:
            # Keras ends an epoch for this only; training continues if it is not set any more then.
            self._stops = not self.model.stop_training
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin to count from zero (local)."""
        if self._stops:
            self.model.stop_training = self._stops = False
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set `state.epoch` to the number of epochs that are done, those before `fit` included.

    Args:
        state: state with the attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Count the epoch (local)."""
        self.state.epoch += 1
