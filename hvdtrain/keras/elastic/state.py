"""The training state of a script: a model, its optimizer, and values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.elastic import ObjectState
from hvdtrain.core.horovod_api import rank
from hvdtrain.core.objects import broadcast_object
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.operations import broadcast_variables
from hvdtrain.keras.backends.optimizer_mixin import DistributedMixin
from hvdtrain.keras.backends.types import Model, Variable, to_array

__all__ = ["KerasState", "TensorFlowKerasState"]


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
        model: Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: object = None,
        **kwargs: Any,
    ) -> None:
        if not model.built:
            raise ValueError("KerasState needs a model that is built: call model.build(shape)")
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise ValueError("KerasState needs an optimizer: give it one, or compile the model")
        _require_stateless(optimizer)
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
        model: Any = self.model
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

    def _variables(self) -> list[Variable]:
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return [*self.model.weights, *self.optimizer.variables]


def _require_stateless(optimizer: keras.optimizers.Optimizer) -> None:
    here = context.current()
    if here.failures is None or not isinstance(optimizer, DistributedMixin):
        return
    exchange = optimizer.hvdtrain_reduction.settings.make_exchange()
    if not exchange.stateless:
        raise UnsupportedError(
            f"{here.topology.title} KerasState: a job cannot continue without a rank with exchange "
            f"{exchange.spec!r}: use average or half, or leave out --elastic and --with-ft ulfm"
        )


class KerasState(TensorFlowKerasState):
    """A TensorFlowKerasState by its other name.

    Args:
        model: model that is built; becomes the attribute `model`.
        optimizer: optimizer of the model; by default the one that it is compiled with.
        kwargs: picklable objects, which become attributes.
    """

    def __init__(
        self,
        model: Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, optimizer, **kwargs)
