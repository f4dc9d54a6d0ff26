"""Callbacks that change the learning rate from epoch to epoch or from batch to batch."""

from __future__ import annotations

from collections.abc import Callable

import keras

from hvdtrain.collective import collective
from hvdtrain.core import objects
from hvdtrain.core.horovod_api import rank, size
from hvdtrain.keras.backends.sharding import StateVariable
from hvdtrain.keras.backends.types import Logs

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback", "warmup_multiplier"]


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
        if self.momentum_correction and old > 0.0 and new != old:
            for velocity in _velocities(optimizer):
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


def _velocities(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable | StateVariable]:
    if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.built:
        return []
    return list(optimizer.momentums) if optimizer.momentum else []
