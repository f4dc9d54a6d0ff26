"""Learning rates that change from epoch to epoch, or from batch to batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.core import objects
from hvdtrain.core.horovod_api import rank, size

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback", "warmup_multiplier"]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to initial_lr * multiplier(epoch), and put it into the logs as `lr`.

    Args:
        initial_lr: of all ranks together.
        multiplier: takes the epoch; or a number c for c ** (epoch - start_epoch).
        start_epoch: the first epoch in which it is set.
        end_epoch: the first in which it is not any more; None for never.
        staircase: set it at the beginning of each epoch only; else before every batch, with the
            epoch's part that is done.
        momentum_correction: scale the velocities of SGD once by new / old rate, as they hold
            steps, not gradients.
        steps_per_epoch: batches of an epoch on a rank, needed without `staircase` where Keras
            does not know it.

    Raises:
        ValueError: there is no initial_lr; or, when fit begins, the number of batches is not
            known, or the optimizer's learning rate is a schedule of its own.
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

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has on the rank that has most (collective)."""
        optimizer = _stepping(self.model.optimizer)
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise ValueError(
                f"{type(self).__name__} sets the learning rate, but the optimizer has a schedule "
                "of its own: give the optimizer a number"
            )
        if self.staircase:
            return
        own = self.steps_per_epoch or self.params.get("steps")
        told = objects.allgather_object(own, "batches of an epoch")
        self._steps = 0 if None in told else max(told)
        if not self._steps:
            raise ValueError(
                f"{type(self).__name__} needs to know the batches of an epoch: give it "
                "steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate, if its time has come."""
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.multiplier(self._epoch + batch / self._steps))
        elif batch == 0:
            self._set(self.multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the learning rate into the logs."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, multiplier: float) -> None:
        model: Any = self.model
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # which lets variables be read and set between steps
        optimizer = _stepping(model.optimizer)
        old, new = float(optimizer.learning_rate), self.initial_lr * multiplier
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0.0 and new != old:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Let the learning rate grow from initial_lr / size to initial_lr, a little with each batch.

    Before batch i of epoch e, with s batches an epoch, it is
    initial_lr / size * ((e + (i + 1) / s) * (size - 1) / warmup_epochs + 1).

    Args:
        initial_lr: of all ranks together, which is where it ends.
        warmup_epochs: how many epochs that takes.
        momentum_correction: as of LearningRateScheduleCallback.
        steps_per_epoch: as of LearningRateScheduleCallback.
        verbose: 1 has rank 0 say when it is done.
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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the learning rate into the logs, and say when it is the last one."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and epoch + 1 == self.end_epoch:
            reached = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {reached:g}.")


def warmup_multiplier(epoch: float, warmup_epochs: int, steps: int, ranks: int) -> float:
    """Return what the learning rate of `ranks` ranks is multiplied by before a batch.

    Args:
        epoch: with the part of it that is done.
        warmup_epochs: how many epochs it takes to get to 1.
        steps: batches of an epoch.
        ranks: how many there are.
    """
    epoch += 1.0 / steps  # rounds it at the end of each epoch
    return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks


def _stepping(optimizer: Any) -> Any:
    """Return the optimizer that has the learning rate."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _velocities(optimizer: Any) -> list[Any]:
    if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.built:
        return []
    return list(optimizer.momentums) if optimizer.momentum else []
