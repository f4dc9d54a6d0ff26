"""Training with Keras and a parameter server: workers compute gradients, servers step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.data.sampling import Indices
from hvdtrain.errors import UsageError
from hvdtrain.keras.backends.sharding import ELEMENTWISE, NOT_ELEMENTWISE, is_keras
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable
from hvdtrain.train.keras.fit import StepPlanSchedule, plain_optimizer
from hvdtrain.train.keras.loop import KerasLoop
from hvdtrain.train.loop.step_plan import StepPlan, padded
from hvdtrain.train.metrics import Totals
from hvdtrain.train.parameter_server.protocol import ParameterServer
from hvdtrain.train.parameter_server.rounds import (
    Flat,
    ParameterRow,
    ServedRounds,
    Shard,
    State,
    refuse_optimizer,
)
from hvdtrain.train.recipe import Recipe


class GradientCollector(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Keeps the gradients of a step, and leaves the variables as they are."""

    def __init__(self, variables: Sequence[KerasVariable]) -> None:
        super().__init__(learning_rate=0.0, name="gradients")
        self.build(list(variables))

    def build(self, variables: list[KerasVariable]) -> None:
        super().build(variables)
        self.gradients: list[Any] = [
            self.add_variable_from_reference(variable, name="gradient") for variable in variables
        ]

    def apply(
        self,
        grads: Sequence[BackendTensor | None],
        trainable_variables: Iterable[KerasVariable] | None = None,
    ) -> None:
        for kept, gradient in zip(self.gradients, grads, strict=True):
            kept.assign(keras.ops.zeros_like(kept) if gradient is None else gradient)


class BuiltOptimizer:
    """A Keras optimizer, built for variables."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.optimizer, self.variables = optimizer, list(variables)
        self.slots: list[dict[str, Any]] = [{} for _ in self.variables]
        numbers = {id(variable): number for number, variable in enumerate(self.variables)}
        plain = self.optimizer.add_variable_from_reference

        def noting(reference_variable: Any, name: str, **others: Any) -> Any:
            made = plain(reference_variable, name=name, **others)
            self.slots[numbers[id(reference_variable)]][name] = made
            return made

        self.optimizer.add_variable_from_reference = noting
        self.optimizer.build(self.variables)
        del self.optimizer.add_variable_from_reference
        of_variables = {id(slot) for slots in self.slots for slot in slots.values()}
        self.others = [v for v in optimizer.variables if id(v) not in of_variables]

    def states(self) -> list[State]:
        """Return the state of each variable; what there is once is part of each."""
        others = {str(n): _flat(variable).reshape(()) for n, variable in enumerate(self.others)}
        return [others | {name: _flat(slot) for name, slot in own.items()} for own in self.slots]

    def load(self, states: Sequence[State]) -> None:
        for slots, state in zip(self.slots, states, strict=True):
            for name, slot in slots.items():
                if name in state:
                    _assign(slot, state[name])
        known: State = next((state for state in states if state), {})
        for number, variable in enumerate(self.others):
            if str(number) in known:
                _assign(variable, known[str(number)])


def _flat(variable: Any) -> Flat:
    array: Flat = keras.ops.convert_to_numpy(variable).reshape(-1)
    return array


def _assign(variable: Any, elements: Flat) -> None:
    variable.assign(elements.reshape(variable.shape).copy())  # backends may keep the memory


def _settings(optimizer: Any) -> dict[str, Any]:
    kinds = (int, float, type(None))
    return {n: v for n, v in vars(optimizer).items() if n[0] != "_" and isinstance(v, kinds)}


def _rate(optimizer: Any) -> Any:
    """Return the learning rate that callbacks can set; None: it has a schedule."""
    rate = optimizer._learning_rate
    return keras.ops.convert_to_numpy(rate) if isinstance(rate, keras.Variable) else None


def _require_elementwise(optimizer: Any) -> None:
    for name in (*NOT_ELEMENTWISE, "global_clipnorm"):
        value = getattr(optimizer, name)
        if value:
            raise UsageError(
                f"--strategy ps cannot use {name}={value} of the recipe's optimizer "
                f"{type(optimizer).__name__}: leave it out"
            )


class KerasShard(Shard):
    """A shard whose variables are parts of the model's, in host memory."""

    def __init__(
        self,
        optimizer: Any,
        set_step: Callable[[int], None],
        whole: BuiltOptimizer,
        segments: Sequence[Segment],
        weights: Flat,
    ) -> None:
        super().__init__(segments, weights)
        self._set_step, self._whole = set_step, whole.optimizer
        with keras.device("cpu"):
            variables = [
                keras.Variable(part.copy(), dtype=weights.dtype.name, trainable=False)
                for part in self.parts(weights)
            ]
            # Keras tells which variables do not decay by name or identity.
            excluded = [
                variable
                for segment, variable in zip(segments, variables, strict=True)
                if not whole.optimizer._use_weight_decay(whole.variables[segment.parameter])
            ]
            optimizer.exclude_from_weight_decay(var_list=excluded)
            self._own = BuiltOptimizer(optimizer, variables)

    def step(self, gradient: Flat, number: int) -> None:
        if not self.segments:
            return
        self._set_step(number)
        if (rate := _rate(self._whole)) is not None:  # callbacks may have set it
            self._own.optimizer.learning_rate = rate
        with keras.device("cpu"):
            gradients = [keras.ops.convert_to_tensor(part.copy()) for part in self.parts(gradient)]
            self._own.optimizer.apply(gradients)
        for part, variable in zip(self.parts(self.weights), self._own.variables, strict=True):
            part[:] = _flat(variable)

    def states(self) -> list[State]:
        return self._own.states()

    def load(self, states: Sequence[State]) -> None:
        for part, variable in zip(self.parts(self.weights), self._own.variables, strict=True):
            _assign(variable, part)
        self._own.load(states)


class ServedKerasLoop(KerasLoop):
    """A Keras model whose weights the last ranks of the world serve.

    The model is compiled with an optimizer that keeps the gradients of a step. A callback of `fit`
    pulls weights before each step, and pushes the gradients after it. The recipe's own optimizer
    steps on the servers. Servers and workers hold the same model after each call of train(), with
    the weights and the optimizer state of the servers.
    """

    @collective
    def __init__(self, recipe: Recipe, step_plan: StepPlan, settings: ParameterServer) -> None:
        super().__init__(recipe, step_plan)
        variables = self._model.trainable_variables
        types, gradients = [variable.dtype for variable in variables], self._collector.gradients
        self._row = ParameterRow(variables, types, _flat, _assign, lambda: gradients)
        self._rounds = ServedRounds(settings, self._row, self._make_shard)
        self._next_step = 0

    def _make_optimizer(self) -> Any:
        """Return the optimizer whose state checkpoints hold; it never steps."""
        for variable in self._model.trainable_variables:
            if variable.constraint is not None:
                raise UsageError(
                    f"--strategy ps cannot keep the constraint of {variable.path}: servers hold "
                    "parts of parameters: leave it out"
                )
        optimizer = plain_optimizer(self._recipe, self._step_plan.options, self._schedule)
        kind = type(optimizer)
        if not (isinstance(optimizer, ELEMENTWISE) and is_keras(kind)):
            refuse_optimizer(optimizer, "Keras", ELEMENTWISE)
        _require_elementwise(optimizer)
        self._whole = BuiltOptimizer(optimizer, self._model.trainable_variables)
        return optimizer

    def _compile(self, loss: Any) -> None:
        """Compile the model; samples weigh one over their number on this rank."""
        self._collector = GradientCollector(self._model.trainable_variables)
        self._model.compile(self._collector, loss, weighted_metrics=[self._sums])
        self._collects = _settings(self._collector)

    def _make_shard(self, segments: Sequence[Segment], weights: Flat) -> KerasShard:
        schedule = StepPlanSchedule(self._step_plan)
        with keras.device("cpu"):
            optimizer = plain_optimizer(self._recipe, self._step_plan.options, schedule)

        def set_step(number: int) -> None:
            schedule.ahead = number - int(optimizer.iterations)

        return KerasShard(optimizer, set_step, self._whole, segments, weights)

    @collective
    def broadcast(self) -> None:
        super().broadcast()
        self._rounds.load(self._whole.states)

    @property
    def lr(self) -> float:
        return self._step_plan.lr(max(self._next_step - 1, 0))

    @collective
    def synchronize(self) -> None:
        """Average the statistics that forward passes have changed on each worker."""
        self.state.average_statistics(self._rounds.workers)

    @collective
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        if _settings(self._collector) != self._collects or _rate(self._collector):
            raise UsageError(
                "a callback changed the settings of model.optimizer, which with --strategy ps only "
                "collects gradients: change state.optimizer in a hvdtrain.train.Callback"
            )
        if self._rounds.lent:
            _require_elementwise(self._whole.optimizer)
            self._rounds.load(self._whole.states)
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
        if self._rounds.serves:
            if not all(metric.variables for metric in self._recipe.metrics.values()):
                # Some metrics take shapes from the first batch: this one has only padding.
                rows, counted = padded(np.arange(0), self._rows or 1)
                inputs, targets = self._train_reader.read(rows)
                weights = counted.astype(self._step_plan.options.dtype)
                self._model.test_on_batch(inputs, targets, weights)
            self._sums.reset_state()
            taken: int = self._rounds.serve(first, len(batches), go_on)
        else:
            taken = super()._take_steps(epoch, first, batches, note, go_on)
        self._next_step = first + taken
        return taken

    def _callbacks(self, first: int, batches: Sequence[Indices]) -> list[Any]:
        samples = [len(batch[self._step_plan.own_slice(len(batch))]) for batch in batches]
        return [_RoundCallback(self._rounds, first, samples)]


class _RoundCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Pulls weights before each step of a worker, and pushes the gradients after it."""

    def __init__(self, rounds: ServedRounds, first: int, samples: Sequence[int]) -> None:
        super().__init__()
        self._rounds, self._first, self._samples = rounds, first, samples
        self._is_open = False

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        self._is_open = self._rounds.pull(self._samples[batch])

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """Send the gradients to the servers, unless the round was over before the step."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # makes variables current, so that they can be read and set
        if self._is_open:
            self._rounds.push(self._first + batch, self._samples[batch])
