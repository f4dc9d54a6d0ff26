"""The callback that makes all ranks start from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.collective import collective
from hvdtrain.keras.backends.distributed import training_state
from hvdtrain.keras.backends.operations import broadcast_variables
from hvdtrain.keras.backends.types import KerasModel, KerasVariable, Logs

__all__ = ["BroadcastGlobalVariablesCallback"]


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
        model: KerasModel = self.model
        # A model whose class has no `build` is marked as built before it has weights.
        if self.broadcast_done or not (model.built and model.weights):
            return
        local = {id(variable) for variable in self.local_variables}
        state = [variable for variable in training_state(model) if id(variable) not in local]
        broadcast_variables(state, self.root_rank)
        self.broadcast_done = True
