"""Training with Keras and a parameter server: workers compute gradients, servers step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.data.sampling import Indices
from hvdtrain.errors import UsageError
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable
from hvdtrain.train.keras.fit import StepPlanSchedule, plain_optimizer
from hvdtrain.train.keras.loop import KerasLoop
from hvdtrain.train.loop.step_plan import StepPlan, padded
from hvdtrain.train.metrics import Totals
from hvdtrain.train.parameter_server.protocol import Flat, Outline, ParameterRow, Piece, State
from hvdtrain.train.parameter_server.rounds import ServedRounds
from hvdtrain.train.parameter_server.settings import ParameterServer
from hvdtrain.train.recipes.recipe import Recipe


class GradientCollector(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Keeps the gradients of a step, and leaves the variables as they are."""

    def __init__(self, variables: Sequence[KerasVariable]) -> None:
        super().__init__(learning_rate=0.0, name="gradients")
        self.build(list(variables))

    def build(self, variables: list[KerasVariable]) -> None:
        """Make the variables for the gradients."""
        super().build(variables)
        self.gradients: list[Any] = [
            self.add_variable_from_reference(variable, name="gradient") for variable in variables
        ]

    def apply(
        self,
        grads: Sequence[BackendTensor | None],
        trainable_variables: Iterable[KerasVariable] | None = None,
    ) -> None:
        """Keep gradients."""
        for kept, gradient in zip(self.gradients, grads, strict=True):
            kept.assign(keras.ops.zeros_like(kept) if gradient is None else gradient)


# Optimizers whose step for an element depends on no other element.
_ELEMENTWISE = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW),
    *(keras.optimizers.Adagrad, keras.optimizers.Adadelta, keras.optimizers.Adamax),
    *(keras.optimizers.Nadam, keras.optimizers.RMSprop, keras.optimizers.Ftrl),
    keras.optimizers.Lion,
)

# Settings that need whole parameters, or more than the gradients of one step.
_REFUSED = (
    *("clipnorm", "global_clipnorm", "use_ema", "loss_scale_factor"),
    "gradient_accumulation_steps",
)


def require_elementwise(optimizer: Any) -> None:
    """Check that an optimizer can step on parts of variables."""
    kind = type(optimizer)
    # On the torch backend Keras makes an optimizer of a subclass of its own.
    if not (isinstance(optimizer, _ELEMENTWISE) and kind.__module__.startswith("keras.src.")):
        names = ", ".join(known.__name__ for known in _ELEMENTWISE)
        raise UsageError(
            f"--strategy ps cannot use the recipe's optimizer {kind.__name__}: servers step on "
            f"parts of parameters, as Keras's {names} can"
        )
    for name in _REFUSED:
        value = getattr(optimizer, name)
        if value:
            raise UsageError(
                f"--strategy ps cannot use {name}={value} of the recipe's optimizer "
                f"{kind.__name__}: leave it out"
            )


class BuiltOptimizer:
    """A Keras optimizer, built for variables."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.optimizer, self.variables = optimizer, list(variables)
        self.slots: list[dict[str, Any]] = [{} for _ in self.variables]
        self._build()
        of_variables = {id(slot) for slots in self.slots for slot in slots.values()}
        self.others = [v for v in optimizer.variables if id(v) not in of_variables]

    def _build(self) -> None:
        """Build the optimizer, and note for which variable it makes which of its own."""
        numbers = {id(variable): number for number, variable in enumerate(self.variables)}
        plain = self.optimizer.add_variable_from_reference

        def noting(reference_variable: Any, name: str, **others: Any) -> Any:
            made = plain(reference_variable, name=name, **others)
            self.slots[numbers[id(reference_variable)]][name] = made
            return made

        self.optimizer.add_variable_from_reference = noting
        self.optimizer.build(self.variables)
        del self.optimizer.add_variable_from_reference

    def load(self, states: Sequence[State]) -> None:
        """Overwrite the state of the optimizer."""
        for slots, state in zip(self.slots, states, strict=True):
            for name, slot in slots.items():
                if name in state:
                    slot.assign(state[name].reshape(slot.shape).copy())
        known = next(state for state in states if state)
        for number, variable in enumerate(self.others):
            variable.assign(known[str(number)])


class KerasShard:
    """A shard whose variables are pieces of the model's, in host memory."""

    def __init__(
        self,
        optimizer: Any,
        set_step: Callable[[int], None],
        whole: BuiltOptimizer,
        pieces: Sequence[Piece],
        flat: Flat,
    ) -> None:
        self._optimizer, self._set_step, self._whole = optimizer, set_step, whole
        self._pieces, self.weights = list(pieces), flat
        with keras.device("cpu"):
            self._variables = [
                keras.Variable(_part(flat, piece), dtype=flat.dtype.name, trainable=False)
                for piece in self._pieces
            ]
            self._exclude_from_weight_decay()
            self._own = BuiltOptimizer(optimizer, self._variables)

    def _exclude_from_weight_decay(self) -> None:
        """Take over which variables do not decay; Keras tells them by name or identity."""
        excluded = [
            variable
            for piece, variable in zip(self._pieces, self._variables, strict=True)
            if not self._whole.optimizer._use_weight_decay(self._whole.variables[piece.parameter])
        ]
        self._optimizer.exclude_from_weight_decay(var_list=excluded)

    def step(self, gradient: Flat, number: int) -> None:
        if not self._pieces:
            return
        self._set_step(number)
        with keras.device("cpu"):
            parts = [_part(gradient, piece) for piece in self._pieces]
            self._optimizer.apply([keras.ops.convert_to_tensor(part) for part in parts])
        for piece, variable in zip(self._pieces, self._variables, strict=True):
            self.weights[_span(piece)] = keras.ops.convert_to_numpy(variable)

    def load_state(self) -> None:
        """Take the shard's weights, and its part of the state of the whole optimizer."""
        for number, piece in enumerate(self._pieces):
            self._variables[number].assign(_part(self.weights, piece))
            for name, slot in self._own.slots[number].items():
                whole = keras.ops.convert_to_numpy(self._whole.slots[piece.parameter][name])
                slot.assign(whole.reshape(-1)[piece.begin : piece.begin + piece.count].copy())
        for own, whole in zip(self._own.others, self._whole.others, strict=True):
            own.assign(_copy(whole))

    def outline(self) -> Outline:
        others = {str(number): _copy(variable) for number, variable in enumerate(self._own.others)}
        return [
            (piece, others | {name: np.dtype(slot.dtype) for name, slot in slots.items()})
            for piece, slots in zip(self._pieces, self._own.slots, strict=True)
        ]

    def write_state(self, name: str, flat: Flat) -> None:
        for piece, slots in zip(self._pieces, self._own.slots, strict=True):
            flat[_span(piece)] = keras.ops.convert_to_numpy(slots[name])


def _span(piece: Piece) -> slice:
    return slice(piece.start, piece.start + piece.count)


def _part(flat: Flat, piece: Piece) -> Flat:
    """Return a copy of a piece's elements, because backends may keep the memory."""
    return flat[_span(piece)].copy()


def _copy(variable: Any) -> HostArray:
    return np.array(keras.ops.convert_to_numpy(variable))


class VariableRow(ParameterRow):
    """Copies of variables and gradients in host memory."""

    def __init__(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        sizes = [int(np.prod(variable.shape)) for variable in variables]
        super().__init__(sizes, [variable.dtype for variable in variables])
        self._variables, self._gradients = list(variables), list(gradients)

    def read_weights(self) -> None:
        self._read(self.weights, self._variables)

    def write_weights(self) -> None:
        for part, variable in zip(self._parts(self.weights), self._variables, strict=True):
            variable.assign(part.reshape(variable.shape).copy())  # backends may keep the memory

    def read_gradients(self) -> None:
        self._read(self.gradients, self._gradients)

    def _read(self, flat: Flat, variables: Sequence[Any]) -> None:
        for part, variable in zip(self._parts(flat), variables, strict=True):
            part[:] = keras.ops.convert_to_numpy(variable).reshape(-1)

    def _parts(self, flat: Flat) -> list[Flat]:
        return np.split(flat, np.cumsum(self.sizes)[:-1])


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
        super().broadcast()
        self._row.read_weights()
        if self._rounds.shard is not None:
            self._rounds.shard.load_state()

    @property
    def lr(self) -> float:
        return self._step_plan.lr(max(self._next_step - 1, 0))

    @collective
    def synchronize(self) -> None:
        """Average the statistics that forward passes have changed on each worker."""
        self.state.average_statistics(self._rounds.workers)

    @collective
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
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
