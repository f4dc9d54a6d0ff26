"""The state of a rank's own optimizer, which exchanges of weights may average or reset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.local_steps import ExchangedWeights
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.inner_state import InnerState
from hvdtrain.keras.backends.weight_backend import WeightBackend
from hvdtrain.keras.tensors.arrays import to_array
from hvdtrain.keras.tensors.types import Tensor, Variable


class OptimizerState:
    """The state of a rank's own optimizer, between exchanges of weights.

    After a reset the optimizer counts its steps from there, for corrections of its bias, as a new
    one does. Its variable `iterations` goes on, because learning rate schedules depend on it.
    """

    def __init__(
        self, exchange: Exchange, weights: ExchangedWeights, backend: WeightBackend
    ) -> None:
        self._what, self._weights, self._backend = exchange.inner_state, weights, backend
        self.forgotten: Tensor | None = None
        self._forgotten_steps = 0

    @property
    def settles(self) -> bool:
        """Whether exchanges average or reset the state."""
        return self._what is not InnerState.KEEP

    def variables(self, optimizer: keras.optimizers.Optimizer) -> list[Variable]:
        """Return the variables that exchanges average or reset."""
        return _state_variables(optimizer) if self.settles else []

    def note_built(self, optimizer: keras.optimizers.Optimizer, is_new: bool) -> None:
        """Keep the initial state of an optimizer if exchanges reset it."""
        if self._what is not InnerState.RESET:
            return
        with self._backend.outside_traces():
            if not is_new:
                new = type(optimizer).from_config(optimizer.get_config())
                new.build(optimizer._trainable_variables)
                optimizer = new
            self._weights.initial_state = [to_array(v) for v in _state_variables(optimizer)]

    @contextmanager
    def counting_since_reset(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Let the optimizer count its steps from the last reset in this block."""
        if self._what is InnerState.RESET:
            steps = keras.ops.cast(optimizer._iterations, "int32")
            none = [keras.ops.zeros_like(steps)]
            (self.forgotten,) = self._backend.exchange_if(
                self._has_reset, [steps], self._tell, none
            )
        try:
            yield
        finally:
            self.forgotten = None

    def forgotten_steps(self, optimizer: keras.optimizers.Optimizer) -> int | None:
        """Return the number of steps before the last reset, None without resets."""
        if self._what is not InnerState.RESET:
            return None
        return int(to_array(optimizer._iterations)) if self._weights.anew else self._forgotten_steps

    def load(self, forgotten_steps: int) -> None:
        """Go on from a result of forgotten_steps()."""
        self._forgotten_steps, self._weights.anew = forgotten_steps, False

    def _has_reset(self, numbers: list[HostArray]) -> bool:
        if self._weights.anew:
            self.load(int(numbers[0]))
        return self._forgotten_steps > 0

    def _tell(self, _: list[HostArray]) -> list[HostArray]:
        return [np.asarray(self._forgotten_steps, np.int32)]


def _state_variables(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the floating point variables of an optimizer, except its learning rate.

    Those of a loss scale and of accumulated gradients are not among them. Before an optimizer is
    built, it has none.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    others = [inner._learning_rate, *getattr(inner, "_accumulated_gradients", [])]
    known = {id(variable) for variable in others}
    return [v for v in inner.variables if id(v) not in known and "float" in v.dtype]
