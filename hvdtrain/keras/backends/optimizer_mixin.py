"""The base class of distributed optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import keras

from hvdtrain.collective import collective
from hvdtrain.core.exchanges.state import SavedExchange
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.keras.backends.reduction import GradientReduction, SampleWeight
from hvdtrain.keras.backends.sharding import StateVariable
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable

# Takes the step of a rank's own optimizer on gradients.
_Update: TypeAlias = Callable[[Sequence[BackendTensor | None]], None]


class DistributedMixin:
    """Base class of distributed optimizers, before the class of the optimizer."""

    hvdtrain_reduction: GradientReduction
    hvdtrain_class: type
    learning_rate: BackendTensor | float
    variables: list[KerasVariable]
    built: bool
    name: str
    _track_variable: Callable[[StateVariable], None]
    _trainable_variables: Sequence[KerasVariable]

    def register_local_var(self, var: KerasVariable) -> None:
        """Do not reduce the gradient of a variable."""
        self.hvdtrain_reduction.add_local(var)

    def exchange_state(self) -> SavedExchange:
        """Return the state of the exchange and the number of steps, for a checkpoint.

        A checkpoint needs that of each rank, because `own` differs between ranks.
        """
        return self.hvdtrain_reduction.exchange_state(self)

    def load_exchange_state(self, state: SavedExchange) -> None:
        """Restore the state of the exchange, when model and optimizer are restored."""
        self.hvdtrain_reduction.load_exchange_state(state)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange; None for the default average or sum."""
        return self.hvdtrain_reduction.settings.exchange

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks step on their own gradients, and exchange weights afterwards.

        With post-local SGD that is so from its switch on.
        """
        return self.hvdtrain_reduction.exchanges_weights

    @property
    def sample_weight(self) -> SampleWeight:
        """Weight of this rank in the next steps: what its loss divides by; None if not known.

        It is for loops of your own; `fit` and `train_on_batch` take it from Keras's losses, where
        it is None, or from a function of (x, y, sample_weight) of a batch, or from what a
        `train_step` of your own sets before it applies gradients. Gradients are
        averaged as sum_r(c_r g_r) / sum_r(c_r), where g_r is the gradient of rank r's mean loss;
        weights count with all samples since those of all ranks were equal. In a function that is
        traced, set it there to a tensor: keras.ops.shape(batch)[0] on TensorFlow, and an argument
        of the function on JAX, which traces it again for each shape.
        """
        return self.hvdtrain_reduction.sample_weight

    @sample_weight.setter
    def sample_weight(self, weight: SampleWeight) -> None:
        # A tensor may have no value yet.
        number = weight if weight is None or isinstance(weight, int | float) else 1.0
        self.hvdtrain_reduction.settings.check_sample_weight(number)
        self.hvdtrain_reduction.sample_weight = weight

    @property
    def sharded(self) -> bool:
        """Whether the ranks of the node share the optimizer's work."""
        return self.hvdtrain_reduction.shared is not None

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all ranks were equal."""
        weights = self.hvdtrain_reduction.weights
        return weights is None or weights.synchronized

    @collective
    def flush(self) -> None:
        """Exchange weights now if those of any rank have changed since all were equal.

        Afterwards all ranks have the same bits. With an exchange of gradients it does nothing.
        """
        self.hvdtrain_reduction.flush(self)

    @property
    def iterations(self) -> BackendTensor:
        """Number of steps; during an update, of those since an exchange has reset the state.

        Keras's own learning rate schedules count all steps.
        """
        count: BackendTensor = super().iterations  # type: ignore[misc]
        weights = self.hvdtrain_reduction.weights
        forgotten = None if weights is None else weights.inner_state.forgotten
        if forgotten is None:
            return count
        passes = getattr(self, "gradient_accumulation_steps", None) or 1
        updates = keras.ops.cast(keras.ops.floor_divide(forgotten, passes), count.dtype)
        since: BackendTensor = keras.ops.subtract(count, updates)
        return since

    def build(self, variables: Sequence[KerasVariable]) -> None:
        is_new, weights = not self.built, self.hvdtrain_reduction.weights
        super().build(variables)  # type: ignore[misc]
        self.hvdtrain_reduction.variables = self._trainable_variables
        if is_new and self.hvdtrain_reduction.shared is not None:
            self.hvdtrain_reduction.shared.build(self)
        if is_new and weights is not None:
            weights.inner_state.note_built(self, is_new=True)

    def add_variable_from_reference(
        self, reference_variable: KerasVariable, name: str | None = None, initializer: str = "zeros"
    ) -> KerasVariable | StateVariable:
        create = super().add_variable_from_reference  # type: ignore[misc]
        shared = self.hvdtrain_reduction.shared
        if shared is None:
            variable: KerasVariable = create(reference_variable, name=name, initializer=initializer)
            return variable
        own = f"{self.name}/{reference_variable.path.replace('/', '_')}_{name}"
        state = shared.keep(reference_variable, name or "var", own)
        self._track_variable(state)
        return state

    @collective
    def apply(
        self,
        grads: Sequence[BackendTensor | None],
        trainable_variables: Iterable[KerasVariable] | None = None,
    ) -> None:
        """Reduce gradients, outside of any condition, and update the variables."""
        given = None if trainable_variables is None else list(trainable_variables)
        variables = self._trainable_variables if given is None else given
        update: _Update = partial(super().apply, trainable_variables=given)  # type: ignore[misc]
        if len(grads) != len(variables):  # Keras raises the error
            update(grads)
        elif self.hvdtrain_reduction.shared is not None:
            if not self.built:
                self.build(variables)
            self.hvdtrain_reduction.update_together(self, grads, variables)
        elif self.hvdtrain_reduction.weights is not None:
            self.hvdtrain_reduction.update_alone(update, grads, variables, self)
        else:
            update(self._reduce(grads, variables))

    @collective
    def _reduce(
        self, grads: Sequence[BackendTensor | None], variables: Sequence[KerasVariable]
    ) -> list[BackendTensor | None]:
        """Reduce gradients over the ranks; None stays None."""
        return self.hvdtrain_reduction(grads, variables)
