"""What stands before and after the user's callbacks, so that ranks train and end together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.core import context, objects, operations
from hvdtrain.core.arrays import reduce
from hvdtrain.core.process_set import global_process_set
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.keras.backends.choose import chosen
from hvdtrain.keras.backends.wrapping import optimizers_of, state_of
from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.keras.callbacks.order import collective_kinds, objection
from hvdtrain.keras.operations.values import broadcast_variables, refuse_different
from hvdtrain.types import ReduceOp

__all__ = ["Beginning", "End"]


class Beginning(keras.callbacks.Callback):
    """Comes first: refuses what cannot work, and waits for ranks that have more data.

    A rank whose data have ended takes part in the steps of others with zeros and no weight. When
    all have ended, it gets the weights and the optimizers of a rank that did all steps.

    Args:
        callbacks: the user's.

    Raises:
        MismatchError: models or callbacks differ between ranks (at the start of fit).
        ValueError: the order of callbacks cannot work (at the start of fit, on every rank).
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._steps_before, self._over = 0, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse what cannot work, and find out whether ranks have as many batches (collective)."""
        model: Any = self.model
        problem = objection(self._callbacks)
        own = (problem, collective_kinds(self._callbacks), self.params.get("steps"))
        told = objects.allgather_object(own, "callbacks of fit")
        self._refuse_callbacks([(kinds, problem) for problem, kinds, _ in told])
        refuse_different(model.trainable_variables if model.built else [], "fit")
        uneven = len({steps for _, _, steps in told}) > 1 or told[0][2] is None
        for optimizer in optimizers_of(model):
            reduction = optimizer.hvdtrain_reduction
            if reduction.uneven is not uneven:
                reduction.uneven = uneven
                chosen().trace_again(model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from here on."""
        self._steps_before, self._over = self._steps(), False

    def on_test_begin(self, logs: Any = None) -> None:
        """End the epoch before it is validated (collective)."""
        self._end_together()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the epoch, unless that was done before its validation (collective)."""
        self._end_together()

    def _end_together(self) -> None:
        if self._over:
            return
        self._over = True
        chosen().settle()
        operations.join()
        done = objects.allgather_object(self._steps() - self._steps_before, "steps of an epoch")
        most = max(done)
        if min(done) < most:
            self._catch_up(done.index(most), done)
        else:
            _average_statistics(self.model)

    def _steps(self) -> int:
        return sum(each.hvdtrain_reduction.steps for each in optimizers_of(self.model))

    def _catch_up(self, root_rank: int, done: Sequence[int]) -> None:
        """Get the state of a rank that did all steps (collective)."""
        model: Any = self.model
        optimizers = optimizers_of(model)
        title = context.current().topology.title
        if any(optimizer.hvdtrain_reduction.has_local for optimizer in optimizers):
            raise UnsupportedError(
                f"{title} fit: ranks did {done} steps in this epoch, but layers that stay local go "
                "with equal numbers only: give every rank the same steps_per_epoch"
            )
        kept = {
            id(variable)
            for callback in self._callbacks
            if isinstance(callback, BroadcastGlobalVariablesCallback)
            for variable in callback.local_variables
        }
        state = [variable for variable in state_of(model) if id(variable) not in kept]
        broadcast_variables(state, root_rank)

    def _refuse_callbacks(self, told: Sequence[tuple[list[str], str | None]]) -> None:
        size = context.current().topology.size
        for rank, (kinds, problem) in enumerate(told):
            if problem is not None:
                raise ValueError(f"[rank {rank}/{size}] fit: {problem}")
            if kinds != told[0][0]:
                raise MismatchError(
                    f"[rank {rank}/{size}] fit: callbacks {kinds}, but rank 0 has {told[0][0]}. "
                    "Give every rank those that ask other ranks, in the same order"
                )


class End(keras.callbacks.Callback):
    """Comes last: what the user's callbacks decided on one rank holds on all.

    Args:
        callbacks: the user's.

    Raises:
        MismatchError: ranks are to train other epochs (at the start of fit).
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._restores = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse epochs that differ between ranks, which a callback may have set (collective)."""
        epochs = (getattr(self.model, "_initial_epoch", None) or 0, self.params.get("epochs"))
        restores = any(
            getattr(callback, "restore_best_weights", False) for callback in self._callbacks
        )
        told = objects.allgather_object((epochs, restores), "epochs of fit")
        self._restores = any(restores for _, restores in told)
        size, expected = context.current().topology.size, told[0][0]
        for rank, (epochs, _) in enumerate(told):
            if epochs != expected:
                raise MismatchError(
                    f"[rank {rank}/{size}] fit: epochs {epochs[0]} to {epochs[1]}, but rank 0 has "
                    f"{expected[0]} to {expected[1]}. Give every rank the same epochs, and restore "
                    "with RankZero(BackupAndRestore(...))"
                )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop if any rank does, at rank 0's learning rates (collective)."""
        model: Any = self.model
        optimizers = optimizers_of(model)
        rates = [float(optimizer.learning_rate) for optimizer in optimizers]
        told = objects.allgather_object((bool(model.stop_training), rates), "end of an epoch")
        model.stop_training = any(stop for stop, _ in told)
        if any(theirs != told[0][1] for _, theirs in told):
            for optimizer, rate in zip(optimizers, told[0][1], strict=True):
                optimizer.learning_rate = rate

    def on_train_end(self, logs: Any = None) -> None:
        """Have the weights that rank 0 found best, if EarlyStopping restored some (collective)."""
        if self._restores:
            broadcast_variables(self.model.weights, 0)


def _average_statistics(model: Any) -> None:
    """Give all ranks the averages of what BatchNormalization has counted (collective)."""
    statistics = [
        variable
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built and layer.trainable
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
    if statistics:
        arrays = [keras.ops.convert_to_numpy(variable) for variable in statistics]
        averages = reduce.allreduce(
            arrays, ReduceOp.AVERAGE, "statistics", 1.0, 1.0, global_process_set
        )
        for variable, average in zip(statistics, averages, strict=True):
            variable.assign(average)
