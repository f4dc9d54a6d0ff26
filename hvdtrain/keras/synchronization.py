"""Callbacks around the user's ones, which keep the epochs of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from hvdtrain.collective import collective
from hvdtrain.core import context, objects, operations
from hvdtrain.core.arrays import collectives
from hvdtrain.core.gradients.exchange import SavedExchange
from hvdtrain.core.gradients.step_info import (
    MOST_ELEMENTS,
    WeightSums,
    is_due,
    note_differences,
    sum_weights,
)
from hvdtrain.core.process_set import global_process_set
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.keras.backends.distributed import (
    DistributedMixin,
    current_backend,
    distributed_optimizers,
    training_state,
)
from hvdtrain.keras.backends.operations import broadcast_variables, described
from hvdtrain.keras.backends.types import Logs, to_array
from hvdtrain.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    MetricAverageCallback,
    SaveSchedule,
    SharedBackup,
    save_schedules,
)
from hvdtrain.types import ReduceOp

_COLLECTIVE = (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    MetricAverageCallback,
    SharedBackup,
)
_DECIDING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    BestModelCheckpoint,
)


def _find_problem(callbacks: Sequence[keras.callbacks.Callback]) -> str | None:
    """Return the reason why these callbacks cannot work on several ranks, or None."""
    deciding = None
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            return (
                "BackupAndRestore would let each rank resume from a different epoch: use "
                "RankZero(BackupAndRestore(...)) on every rank"
            )
        if isinstance(callback, _DECIDING):
            deciding = type(callback).__name__
        if deciding is not None and isinstance(callback, MetricAverageCallback):
            return (
                f"{deciding} comes before MetricAverageCallback, so that each rank would decide "
                "on its own metrics: put MetricAverageCallback first"
            )
    return None


class FirstCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs before the user's callbacks: checks them, and waits for ranks that have more data.

    A rank whose data have ended contributes zeros with weight 0 to the steps of other ranks. When
    all ranks are done, it gets the weights and the optimizers of a rank that did all steps.

    If ranks exchange weights, they are made equal before any rank saves in the middle of an epoch.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._steps_before, self._ended = 0, False
        self._saves, self._schedules = False, list[SaveSchedule]()

    @collective
    def on_train_begin(self, logs: Logs | None = None) -> None:
        model = self.model
        problem, saves = _find_problem(self._callbacks), bool(save_schedules(self._callbacks))
        names = [type(each).__name__ for each in self._callbacks if isinstance(each, _COLLECTIVE)]
        own = (problem, names, self.params.get("steps"), saves)
        gathered = objects.allgather_object(own, "callbacks of fit")
        size = context.current().topology.size
        for rank, (problem, names, *_) in enumerate(gathered):
            if problem is not None:
                raise ValueError(f"[rank {rank}/{size}] fit: {problem}")
            if names != gathered[0][1]:
                raise MismatchError(
                    f"[rank {rank}/{size}] fit: callbacks {names}, but rank 0 has "
                    f"{gathered[0][1]}. Give every rank the callbacks that communicate, in the "
                    "same order"
                )
        weights = [each.hvdtrain_reduction.weights for each in distributed_optimizers(model)]
        flushes = any(each is not None and each.flush_in_fit for each in weights)
        self._saves = flushes and any(saves for *_, saves in gathered)
        variables = described(model.trainable_variables) if model.built else []
        # A rank that joins others builds its model in the step that these take for it.
        is_new = not model.built and context.current().newcomer
        objects.require_equal_variables(None if is_new else variables, "fit")
        uneven = len({steps for _, _, steps, _ in gathered}) > 1 or gathered[0][2] is None
        for optimizer in distributed_optimizers(model):
            reduction = optimizer.hvdtrain_reduction
            if reduction.uneven is not uneven:
                reduction.uneven = uneven
                current_backend().retrace(model)

    @collective
    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start to count steps (collective if a rank saves after batches)."""
        self._steps_before, self._ended = self._steps(), False
        if self._saves:
            own = save_schedules(self._callbacks)
            gathered = objects.allgather_object(own, "saves of an epoch")
            self._schedules = [schedule for schedules in gathered for schedule in schedules]

    @collective
    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Take part in the exchange before another rank saves (collective if one does).

        That is soon enough on a rank that does not save itself, and leaves Keras free to run
        callbacks beside the next step.
        """
        if batch > 0:
            self._flush_before_saves(batch - 1)

    @collective
    def _flush_before_saves(self, batch: int) -> None:
        """Make weights equal after a batch if any rank saves then (collective if so)."""
        saves = [schedule.saves_after(batch) for schedule in self._schedules]
        if any(saves):
            self._flush(ended=False)

    @collective
    def _flush(self, ended: bool) -> None:
        optimizers = []
        for optimizer in distributed_optimizers(self.model):
            weights = optimizer.hvdtrain_reduction.weights
            if weights is not None and weights.exchanges_weights and weights.flush_in_fit:
                optimizers.append(optimizer)
        while optimizers:
            for optimizer in optimizers:
                optimizer.flush()
            if not self._saves:
                return
            all_ended = all(objects.allgather_object(ended, "flush in fit"))
            if all_ended or not ended:
                return

    @collective
    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._end_epoch()

    @collective
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._end_epoch()

    @collective
    def _end_epoch(self) -> None:
        if self._ended:
            return
        self._ended = True
        current_backend().wait_for_steps()
        optimizers = distributed_optimizers(self.model)
        alone = [each for each in optimizers if each.exchanges_weights]
        if len(alone) < len(optimizers):
            operations.join()
        self._flush(ended=True)
        if len(alone) == len(optimizers):  # ranks may have taken different numbers of steps
            _average_statistics(self.model)
            return
        done = objects.allgather_object(self._steps() - self._steps_before, "steps of an epoch")
        most = max(done)
        if min(done) < most:
            self._broadcast_state(done.index(most), done)
        else:
            _average_statistics(self.model)

    def _steps(self) -> int:
        return sum(each.hvdtrain_reduction.steps for each in distributed_optimizers(self.model))

    @collective
    def _broadcast_state(self, root_rank: int, done: Sequence[int]) -> None:
        model = self.model
        optimizers = distributed_optimizers(model)
        title = context.current().topology.title
        if any(optimizer.hvdtrain_reduction.local for optimizer in optimizers):
            raise UnsupportedError(
                f"{title} fit: ranks did {done} steps in this epoch, but local layers need the "
                "same number on every rank: give every rank the same steps_per_epoch"
            )
        local = {
            id(variable)
            for callback in self._callbacks
            if isinstance(callback, BroadcastGlobalVariablesCallback)
            for variable in callback.local_variables
        }
        state = [variable for variable in training_state(model) if id(variable) not in local]
        broadcast_variables(state, root_rank)
        exchanges: list[SavedExchange] = [optimizer.exchange_state() for optimizer in optimizers]
        exchanges = objects.broadcast_object(exchanges, root_rank, "exchanges of an epoch")
        if done[context.current().topology.rank] < max(done):
            for optimizer, exchange in zip(optimizers, exchanges, strict=True):
                optimizer.load_exchange_state({**exchange, "own": {}})


class FirstBeforeSaving(FirstCallback):
    """A FirstCallback on a rank that saves after batches."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Do nothing: the batch before has had its end."""

    @collective
    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Make weights equal before any rank saves after this batch (collective if so)."""
        self._flush_before_saves(batch)


class LastCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs after the user's callbacks: applies to all ranks what they decided on one."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._restores = self._told = False

    @collective
    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check that ranks are to train the same epochs, which a callback may set."""
        epochs = (getattr(self.model, "_initial_epoch", None) or 0, self.params.get("epochs"))
        restores = any(
            getattr(callback, "restore_best_weights", False) for callback in self._callbacks
        )
        gathered = objects.allgather_object((epochs, restores), "epochs of fit")
        self._restores = any(restores for _, restores in gathered)
        size, expected = context.current().topology.size, gathered[0][0]
        for rank, (epochs, _) in enumerate(gathered):
            if epochs != expected:
                raise MismatchError(
                    f"[rank {rank}/{size}] fit: epochs {epochs[0]} to {epochs[1]}, but rank 0 has "
                    f"{expected[0]} to {expected[1]}. Give every rank the same epochs, and restore "
                    "with RankZero(BackupAndRestore(...))"
                )

    @collective
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Stop if any rank stops, and use rank 0's learning rates."""
        model = self.model
        optimizers = distributed_optimizers(model)
        inner = [(each, getattr(each, "inner_optimizer", each)) for each in optimizers]
        # A MultiOptimizer, also a scaled one, has no rate, but those in it have.
        rated = [rated for each, own in inner for rated in getattr(own, "optimizers", [each])]
        rates = [float(optimizer.learning_rate) for optimizer in rated]
        # Other backends compare weights in a step, where a step of JAX has not their values.
        weights = None
        if keras.backend.backend() == "jax" and is_due(epoch + 1) and not self._told:
            weights = _weight_sums(model, optimizers)
        own = (bool(model.stop_training), rates, weights)
        gathered = objects.allgather_object(own, "end of an epoch")
        model.stop_training = any(stop for stop, *_ in gathered)
        if weights is not None:
            theirs = [each for *_, each in gathered]
            world, at = context.current().world, f"after epoch {epoch + 1}"
            self._told = note_differences(theirs, world, at)
        if any(each != gathered[0][1] for _, each, _ in gathered):
            for optimizer, rate in zip(rated, gathered[0][1], strict=True):
                optimizer.learning_rate = rate

    @collective
    def on_train_end(self, logs: Logs | None = None) -> None:
        """Broadcast rank 0's weights if EarlyStopping restored the best ones."""
        if self._restores:
            broadcast_variables(self.model.weights, 0)


def _weight_sums(model: keras.Model, optimizers: Sequence[DistributedMixin]) -> WeightSums:
    """Return the sums of the weights whose gradients all ranks reduce."""
    model.jax_state_sync()
    rows = []
    for reduction in (optimizer.hvdtrain_reduction for optimizer in optimizers):
        of_all = reduction.settings.process_set is global_process_set and not reduction.local
        for variable in reduction.variables if of_all and reduction.weights is None else ():
            part = to_array(keras.ops.reshape(variable, [-1])[:MOST_ELEMENTS])
            rows.append((variable.path, part, part.itemsize))
    return sum_weights(rows)


@collective
def _average_statistics(model: keras.Model) -> None:
    """Average the statistics of BatchNormalization over the ranks."""
    statistics = [
        variable
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built and layer.trainable
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
    if statistics:
        arrays = [keras.ops.convert_to_numpy(variable) for variable in statistics]
        averages = collectives.allreduce(
            arrays, ReduceOp.AVERAGE, "statistics", 1.0, 1.0, global_process_set
        )
        for variable, average in zip(statistics, averages, strict=True):
            variable.assign(average)
