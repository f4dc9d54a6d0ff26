"""Start all ranks of a `fit` from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.keras.backends.wrapping import state_of
from hvdtrain.keras.operations.values import broadcast_variables

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give all ranks the weights and the optimizer's state of one of them.

    That happens at the start of `fit`. On TensorFlow a model without an Input is built by its
    first batch only, and gets them before its second one. States of random numbers stay each
    rank's own.

    Args:
        root_rank: whose state it is.
        device: makes no difference.
        local_variables: a variable, or several, that each rank keeps.

    Raises:
        MismatchError: models differ between ranks (at the start of fit).
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any | Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        local = [] if local_variables is None else local_variables
        self.local_variables = [local] if isinstance(local, keras.Variable) else list(local)
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep its own value of a variable."""
        self.local_variables.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model is built (collective)."""
        self.broadcast_done = False
        self._broadcast_once()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast what was not built before (collective)."""
        self._broadcast_once()

    def on_train_end(self, logs: Any = None) -> None:
        """Broadcast after the only batch that there was (collective)."""
        self._broadcast_once()

    def _broadcast_once(self) -> None:
        model: Any = self.model
        # A model of a class without `build` says that it is built before it has any weights.
        if self.broadcast_done or not (model.built and model.weights):
            return
        local = {id(variable) for variable in self.local_variables}
        state = [variable for variable in state_of(model) if id(variable) not in local]
        broadcast_variables(state, self.root_rank)
        self.broadcast_done = True
