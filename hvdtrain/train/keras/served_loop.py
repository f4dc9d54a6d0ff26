"""Training with Keras and a parameter server: workers compute gradients, servers step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collective import collective
from hvdtrain.data.sampling.sharding import Indices
from hvdtrain.errors import UsageError
from hvdtrain.train.keras.distributed import plain_optimizer
from hvdtrain.train.keras.fit import StepPlanSchedule
from hvdtrain.train.keras.loop import KerasLoop
from hvdtrain.train.keras.shards.gradients import GradientCollector
from hvdtrain.train.keras.shards.optimizer_state import BuiltOptimizer, require_elementwise
from hvdtrain.train.keras.shards.shard import KerasShard
from hvdtrain.train.keras.shards.variable_row import VariableRow
from hvdtrain.train.loop.step_plan import StepPlan, padded
from hvdtrain.train.metrics.totals import Totals
from hvdtrain.train.parameter_server.rounds import ServedRounds
from hvdtrain.train.parameter_server.settings import ParameterServer
from hvdtrain.train.parameter_server.shards import Piece
from hvdtrain.train.parameter_server.statistics import Pushes
from hvdtrain.train.parameter_server.wire import Flat
from hvdtrain.train.recipes.recipe import Recipe


class ServedKerasLoop(KerasLoop):
    """A Keras model whose weights the last ranks of the world serve.

    The model is compiled with an optimizer that keeps the gradients of a step. A callback of `fit`
    pulls weights before each step, and pushes the gradients after it. The recipe's own optimizer
    steps on the servers. Servers and workers hold the same model after each call of train(), with
    the weights and the optimizer state of the servers.
    """

    def __init__(self, recipe: Recipe, step_plan: StepPlan, settings: ParameterServer) -> None:
        super().__init__(recipe, step_plan)
        self._row = VariableRow(self._model.trainable_variables, self._collector.gradients)
        self._rounds = ServedRounds(settings, self._row, self._make_shard)
        self._next_step = 0

    def _make_optimizer(self) -> Any:
        """Return the optimizer whose state checkpoints hold; it never steps."""
        _refuse_constraints(self._model.trainable_variables)
        optimizer = plain_optimizer(self._recipe, self._step_plan.options, self._schedule)
        require_elementwise(optimizer)
        self._whole = BuiltOptimizer(optimizer, self._model.trainable_variables)
        return optimizer

    def _compile(self, loss: Any) -> None:
        """Compile the model; samples weigh one over their number on this rank."""
        self._collector = GradientCollector(self._model.trainable_variables)
        self._model.compile(self._collector, loss, weighted_metrics=[self._sums])

    def _make_shard(self, pieces: list[Piece], weights: Flat) -> KerasShard:
        schedule = StepPlanSchedule(self._step_plan)
        with keras.device("cpu"):
            optimizer = plain_optimizer(self._recipe, self._step_plan.options, schedule)

        def set_step(number: int) -> None:
            schedule.ahead = number - int(optimizer.iterations)

        return KerasShard(optimizer, set_step, self._whole, pieces, weights)

    @collective
    def broadcast(self) -> None:
        """Copy the weights and the optimizer state of rank 0 to every rank."""
        super().broadcast()
        self._row.read_weights()
        if self._rounds.shard is not None:
            self._rounds.shard.load_state()

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self._step_plan.lr(max(self._next_step - 1, 0))

    @property
    def _exchanges_weights(self) -> bool:
        return False

    @property
    def synchronized(self) -> bool:
        """Whether the weights of all ranks are equal: always after train()."""
        return True

    @collective
    def synchronize(self) -> None:
        """Average the statistics that forward passes have changed on each worker."""
        self.state.average_statistics(self._rounds.workers)

    @property
    def pushes(self) -> Pushes:
        """The gradients that servers have received in this start, over all shards."""
        return self._rounds.pushes

    @collective
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        """Train on the samples that are left of an epoch; see TrainingLoop.train."""
        learned = super().train(epoch, done, go_on)
        self._whole.load(self._rounds.collect())
        return learned

    def _take_steps(
        self,
        epoch: int,
        first: int,
        batches: Sequence[Indices],
        note: Callable[[int], None],
        go_on: Callable[[], bool],
    ) -> int:
        if self._rounds.shard is None:
            taken = super()._take_steps(epoch, first, batches, note, go_on)
        else:
            taken = self._serve(self._rounds.shard, first, len(batches), go_on)
        self._next_step = first + taken
        return taken

    def _serve(self, shard: KerasShard, first: int, rounds: int, go_on: Callable[[], bool]) -> int:
        """Serve rounds until go_on returns False, and return their number."""
        self._reset_sums()
        taken = 0

        def after_round() -> bool:
            nonlocal taken
            taken += 1
            return go_on()

        self._rounds.serve(shard, first, rounds, after_round)
        return taken

    def _reset_sums(self) -> None:
        """Set the sums of a server to zero, in the shapes that they have on workers."""
        if not all(metric.variables for metric in self._recipe.metrics.values()):
            # Some metrics take shapes from the first batch: this one has only padding.
            rows, counted = padded(np.arange(0), self._rows)
            inputs, targets = self._train_reader.read(rows)
            weights = counted.astype(self._step_plan.options.dtype)
            self._model.test_on_batch(inputs, targets, weights)
        self._sums.reset_state()

    def _callbacks(self, first: int, batches: Sequence[Indices]) -> list[Any]:
        samples = [len(batch[self._step_plan.own_slice(len(batch))]) for batch in batches]
        return [_RoundCallback(self._rounds, first, samples)]


class _RoundCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Pulls weights before each step of a worker, and pushes the gradients after it."""

    def __init__(
        self, rounds: ServedRounds[KerasShard], first: int, samples: Sequence[int]
    ) -> None:
        super().__init__()
        self._rounds, self._first, self._samples = rounds, first, samples
        self._is_open = False

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Overwrite the model's weights with those of the servers."""
        self._is_open = self._rounds.pull(self._samples[batch])

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Send the gradients to the servers, unless the round was over before the step."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # makes variables current, so that they can be read and set
        if self._is_open:
            self._rounds.push(self._first + batch, self._samples[batch])


def _refuse_constraints(variables: Sequence[Any]) -> None:
    for variable in variables:
        if variable.constraint is not None:
            raise UsageError(
                f"--strategy ps cannot keep the constraint of {variable.path}: servers hold parts "
                "of parameters: leave it out"
            )
