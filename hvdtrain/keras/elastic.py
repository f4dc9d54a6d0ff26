"""Horovod's elastic interface for Keras 3, on its backends tensorflow, torch and jax."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.elastic import ObjectState, run
from hvdtrain.core.horovod_api import rank
from hvdtrain.core.objects import broadcast_object
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.distributed import DistributedMixin
from hvdtrain.keras.backends.operations import broadcast_variables
from hvdtrain.keras.backends.types import KerasVariable, Logs, to_array

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


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


class TensorFlowKerasState(ObjectState):
    """A model of Keras 3, its optimizer, and values that can be committed and restored.

    It works on all backends of Keras; Horovod has it for TensorFlow.

    Args:
        model: model that is built; becomes the attribute `model`.
        optimizer: optimizer of the model; by default the one that it is compiled with. Becomes the
            attribute `optimizer`.
        backend: ignored.
        kwargs: picklable objects, which become attributes.

    Raises:
        ValueError: the model is not built, or there is no optimizer.
        UnsupportedError: ranks can be lost, and the optimizer's exchange is not average or half.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: object = None,
        **kwargs: Any,
    ) -> None:
        if not model.built:
            raise ValueError("KerasState needs a model that is built: call model.build(shape)")
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise ValueError("KerasState needs an optimizer: give it one, or compile the model")
        here, own = context.current(), isinstance(optimizer, DistributedMixin)
        exchange = optimizer.hvdtrain_reduction.settings.make_exchange() if own else None
        if here.failures is not None and exchange is not None and not exchange.stateless:
            raise UnsupportedError(
                f"{here.topology.title} KerasState: a job cannot continue without a rank with "
                f"exchange {exchange.spec!r}: use average or half, or leave out --elastic and "
                "--with-ft ulfm"
            )
        self.model, self.optimizer, self.backend = model, optimizer, backend
        super().__init__(broadcast_object, lambda: rank(), **kwargs)

    def save(self) -> None:
        """Copy the weights, the optimizer's variables and the values in memory (local)."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # within fit, variables are not current
        self._saved_variables = [np.array(to_array(each)) for each in self._variables()]
        super().save()

    def restore(self) -> None:
        """Restore the last commit() or sync(), else the initial state (local)."""
        model = self.model
        if hasattr(model, "jax_state_sync"):  # a fit that was broken off leaves its arrays there
            model._jax_state, model._jax_state_synced = None, True
        for variable, value in zip(self._variables(), self._saved_variables, strict=True):
            variable.assign(value)
        super().restore()

    @collective
    def sync(self) -> None:
        """Broadcast rank 0's weights, optimizer's variables and values (collective)."""
        broadcast_variables(self._variables(), root_rank=0)
        super().sync()

    def _variables(self) -> list[KerasVariable]:
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return [*self.model.weights, *self.optimizer.variables]


class KerasState(TensorFlowKerasState):
    """A TensorFlowKerasState by its other name.

    Args:
        model: model that is built; becomes the attribute `model`.
        optimizer: optimizer of the model; by default the one that it is compiled with.
        kwargs: picklable objects, which become attributes.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, optimizer, **kwargs)
