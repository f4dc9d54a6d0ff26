"""Start all ranks of a `fit` from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.core import context, objects
from hvdtrain.errors import MismatchError
from hvdtrain.keras.values import broadcast_variables

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give all ranks the weights and the optimizer's state of one of them.

    That happens at the start of `fit`. On TensorFlow a model without an Input is built by its
    first batch only, and gets them before its second one. States of random numbers stay each
    rank's own. Ranks with different numbers of batches are refused, since they would wait for
    one another for ever.

    Args:
        root_rank: whose state it is.
        device: makes no difference.
        local_variables: a variable, or several, that each rank keeps.

    Raises:
        MismatchError: models, or numbers of batches, differ between ranks (at the start of fit).
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any | Sequence[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        local = [] if local_variables is None else local_variables
        self._local = [local] if isinstance(local, keras.Variable) else list(local)
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep its own value of a variable."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model is built (collective)."""
        _refuse_different_steps(self.params.get("steps"))
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
        if self.broadcast_done or not model.built:
            return
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        local = {id(variable) for variable in self._local}
        state = [*model.weights, *(optimizer.variables if optimizer is not None else [])]
        broadcast_variables([v for v in state if id(v) not in local], self.root_rank)
        self.broadcast_done = True


def _refuse_different_steps(steps: int | None) -> None:
    told = objects.allgather_object(steps, "batches of an epoch")
    if len(set(told)) == 1:
        return
    size = context.current().topology.size
    rank = next(rank for rank, theirs in enumerate(told) if theirs != told[0])
    known = [theirs for theirs in told if theirs is not None]
    raise MismatchError(
        f"[rank {rank}/{size}] fit: {told[rank]} batches an epoch, but rank 0 has {told[0]}. Give "
        f"every rank the same number, with fit(steps_per_epoch={min(known)}) for example"
    )
