"""Updates of a model's variables whose work the ranks of a node share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.shared_steps import SharedSteps
from hvdtrain.core.arrays.shared_weights import node_slices
from hvdtrain.core.arrays.step_values import StepValues
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.sharding.rules import rule_of
from hvdtrain.keras.sharding.state_variable import StateVariable
from hvdtrain.keras.tensors.types import Tensor, Variable
from hvdtrain.types import DType

_UNKNOWN = -1.0


class ArrayBackend(Protocol):
    """What shared updates need of Keras's backend."""

    @collective
    def map_arrays(
        self,
        function: Callable[[Sequence[HostArray]], Sequence[HostArray]],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        name: str,
    ) -> list[Tensor]:
        """Call a function on arrays, in the order of the program."""


class SharedUpdate:
    """Updates the variables of an optimizer together with the other ranks of the node."""

    def __init__(self, settings: GradientSettings, name: str, backend: ArrayBackend) -> None:
        self._settings, self._name, self._backend = settings, name, backend
        self._slices = node_slices(settings.process_set)
        self._state: list[tuple[StateVariable, Variable]] = []
        self._steps: SharedSteps | None = None
        self.active = self._slices is not None

    def keep(self, reference: Variable, quantity: str, path: str) -> StateVariable:
        """Return a variable for what the optimizer keeps for a variable of the model."""
        variable = StateVariable(reference, quantity, path)
        self._state.append((variable, reference))
        return variable

    def build(self, optimizer: Any) -> None:
        """Prepare for the variables of an optimizer that is built."""
        assert self._slices is not None
        variables = optimizer._trainable_variables
        self._steps = SharedSteps(
            [_spec(number, variable) for number, variable in enumerate(variables)],
            self._settings,
            self._slices,
            rule_of(optimizer),
            self._name,
        )
        numbers = {id(variable): number for number, variable in enumerate(variables)}
        for state, reference in self._state:
            state.move(self._steps.state, numbers[id(reference)])

    @collective
    def __call__(
        self,
        optimizer: Any,
        gradients: Sequence[Tensor | None],
        variables: Sequence[Variable],
        samples: Tensor | float | None,
    ) -> None:
        """Take a step."""
        assert self._steps is not None
        indices = [optimizer._get_variable_index(variable) for variable in variables]
        own = {i: g for i, g in zip(indices, gradients, strict=True) if g is not None}
        if not own:
            raise ValueError("No gradients provided for any variable.")  # as Keras does
        everything = optimizer._trainable_variables
        dense = [
            keras.ops.cast(keras.ops.convert_to_tensor(gradient), everything[index].dtype)
            for index, gradient in own.items()
        ]
        weights = [keras.ops.convert_to_tensor(variable) for variable in everything]
        numbers = [
            keras.ops.cast(optimizer._get_current_learning_rate(), "float64"),
            keras.ops.cast(optimizer._iterations, "float64"),
            keras.ops.cast(_UNKNOWN if samples is None else samples, "float64"),
        ]
        decayed = [bool(optimizer._use_weight_decay(variable)) for variable in everything]
        steps = self._steps

        def function(arrays: Sequence[HostArray]) -> list[HostArray]:
            rate, done, weight = (float(array) for array in arrays[:3])
            given, values = arrays[3 : 3 + len(own)], arrays[3 + len(own) :]
            now = _values(optimizer, rate, int(done), decayed)
            counted = None if weight == _UNKNOWN else weight
            found: Mapping[int, HostArray] = dict(zip(own, given, strict=True))
            updated = steps.step(values, found, now, counted)
            return [updated[index] for index in own]

        updated = [weights[index] for index in own]
        results = self._backend.map_arrays(
            function, [*numbers, *dense, *weights], updated, self._name
        )
        for index, value in zip(own, results, strict=True):
            variable = everything[index]
            variable.assign(value)
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        optimizer._iterations.assign_add(1)


def _values(optimizer: Any, rate: float, steps: int, decayed: Sequence[bool]) -> StepValues:
    return StepValues(
        rate,
        steps,
        None if optimizer.weight_decay is None else float(optimizer.weight_decay),
        decayed,
        optimizer.global_clipnorm or None,
        optimizer.clipvalue or None,
    )


def _spec(number: int, variable: Variable) -> ParameterSpec:
    shape = tuple(variable.shape)
    kind = np.dtype(variable.dtype).name if variable.dtype != "bfloat16" else "bfloat16"
    if kind not in ("float32", "float64"):
        raise UnsupportedError(
            f"sharded=True: variable {variable.path!r} is {kind}, and float32 and float64 can be "
            "shared: use sharded=False"
        )
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return ParameterSpec(f"variable {number}", shape, strides, DType(kind), kind, "cpu")
