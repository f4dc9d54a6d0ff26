"""Updates of a model's variables whose work the ranks of a node share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.fused import is_overwritten
from hvdtrain.core.arrays.shared_steps import (
    AdamRule,
    ArraySharedSteps,
    KeptArray,
    MuonRule,
    SgdRule,
    StepValues,
    UpdateRule,
    node_slices,
)
from hvdtrain.core.gradient_settings import GradientSettings, check_sharding
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.backend import Backend
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable, to_array

# Each element of a variable is updated by itself.
ELEMENTWISE = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW),
    *(keras.optimizers.Adagrad, keras.optimizers.Adadelta, keras.optimizers.Adamax),
    *(keras.optimizers.Nadam, keras.optimizers.RMSprop, keras.optimizers.Ftrl),
    keras.optimizers.Lion,
)
# Settings with which steps need whole gradients, or more than those of one step.
NOT_ELEMENTWISE = ("clipnorm", "use_ema", "loss_scale_factor", "gradient_accumulation_steps")


def check_shared(optimizer: keras.optimizers.Optimizer, settings: GradientSettings) -> None:
    """Refuse what does not go with a shared step."""
    check_sharding()
    name, backend = type(optimizer).__name__, keras.backend.backend()
    if backend == "jax":
        raise UnsupportedError(
            "sharded=True: on Keras's backend jax a compiled step holds the optimizer's whole "
            "state: use the backend tensorflow or torch, or sharded=False"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UnsupportedError(
            "sharded=True: a LossScaleOptimizer, which compile() makes for the policy "
            "mixed_float16, cannot be shared: use the policy mixed_bfloat16, or sharded=False"
        )
    rules_of(optimizer, ())
    if settings.exchange is not None:
        raise UnsupportedError(
            f"sharded=True: only averages and sums can be shared, not exchange "
            f"{settings.exchange.spec!r}: use sharded=False, or no exchange or compression"
        )
    for setting in (*NOT_ELEMENTWISE, "ema_overwrite_frequency"):
        if getattr(optimizer, setting, None):
            raise UnsupportedError(
                f"sharded=True: {name} with {setting} cannot be shared: leave out {setting}, or "
                "use sharded=False"
            )


def rules_of(optimizer: Any, variables: Sequence[KerasVariable]) -> list[UpdateRule]:
    """Return how an optimizer updates each variable."""
    kind = getattr(optimizer, "hvdtrain_class", type(optimizer))
    name = kind.__name__ if is_keras(kind) else ""
    if name == "SGD":
        sgd = SgdRule(float(optimizer.momentum), bool(optimizer.nesterov))
        return [sgd] * len(variables)
    if name in ("Adam", "AdamW"):
        betas = float(optimizer.beta_1), float(optimizer.beta_2)
        adam = AdamRule(*betas, float(optimizer.epsilon), bool(optimizer.amsgrad))
        return [adam] * len(variables)
    if name == "Muon" and hasattr(optimizer, "lr_adjust"):  # otherwise it is of another Keras
        betas = float(optimizer.adam_beta_1), float(optimizer.adam_beta_2)
        ratio = float(optimizer.adam_lr_ratio)
        adam = AdamRule(*betas, float(optimizer.epsilon), amsgrad=False, ratio=ratio)

        def orthogonalize(matrix: HostArray) -> HostArray:
            tensor = keras.ops.convert_to_tensor(matrix)
            found = optimizer.zeropower_via_newtonschulz5(tensor, optimizer.ns_steps)
            return to_array(optimizer.lr_adjust(found))

        def muon(variable: KerasVariable) -> MuonRule:
            settings = float(optimizer.momentum), bool(optimizer.nesterov)
            return MuonRule(*settings, tuple(variable.shape), orthogonalize)

        return [adam if optimizer._should_use_adamw(v) else muon(v) for v in variables]
    raise UnsupportedError(
        f"sharded=True: of Keras's optimizers SGD, Adam, AdamW and Muon can be shared, got "
        f"{kind.__name__}: use sharded=False"
    )


def is_keras(kind: type) -> bool:
    """Return whether a class is Keras's own; on torch it is a subclass for that backend."""
    return kind.__module__.startswith("keras.")


class StateVariable(KeptArray):
    """What a shared optimizer keeps for a variable of the model, in place of a keras.Variable."""

    trainable = False

    def __init__(self, reference: KerasVariable, path: str) -> None:
        super().__init__(reference.shape, reference.dtype)
        self.path, self.name = path, path.rpartition("/")[2]

    def numpy(self) -> HostArray:
        """Return a copy of the value."""
        return self.read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        return self.read().astype(dtype or self.dtype, copy=False)

    def assign(self, value: BackendTensor | HostArray) -> None:
        """Overwrite the value (local; between two steps)."""
        array = to_array(value)
        if array.shape != self.shape:
            raise ValueError(f"{self.path} has shape {self.shape}, got {array.shape}")
        self.write(array)


_UNKNOWN = -1.0


class KerasSharedUpdate:
    """Updates the variables of an optimizer together with the other ranks of the node."""

    def __init__(self, settings: GradientSettings, name: str, backend: Backend) -> None:
        self._settings, self._name, self._backend = settings, name, backend
        self._slices = node_slices(settings.process_set)
        self._state: list[tuple[KerasVariable, str, StateVariable]] = []
        self._steps: ArraySharedSteps | None = None
        self.active = self._slices is not None

    def keep(self, reference: KerasVariable, quantity: str, path: str) -> StateVariable:
        """Return a variable for what the optimizer keeps for a variable of the model."""
        variable = StateVariable(reference, path)
        self._state.append((reference, quantity, variable))
        return variable

    def build(self, optimizer: Any) -> None:
        """Prepare for the variables of an optimizer that is built."""
        assert self._slices is not None
        variables = optimizer._trainable_variables
        numbers = {id(variable): number for number, variable in enumerate(variables)}
        self._steps = ArraySharedSteps(
            [_spec(number, variable) for number, variable in enumerate(variables)],
            self._settings,
            self._slices,
            rules_of(optimizer, variables),
            {(numbers[id(variable)], name): state for variable, name, state in self._state},
            self._name,
        )

    @collective
    def __call__(
        self,
        optimizer: Any,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        samples: BackendTensor | float | None,
    ) -> None:
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
        decays = [_decay_of(optimizer, variable) for variable in everything]
        steps = self._steps

        def function(arrays: Sequence[HostArray]) -> list[HostArray]:
            rate, done, weight = (float(array) for array in arrays[:3])
            given, values = arrays[3 : 3 + len(own)], arrays[3 + len(own) :]
            clips = optimizer.global_clipnorm or None, optimizer.clipvalue or None
            now = StepValues(rate, int(done), decays, *clips)
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


def _decay_of(optimizer: Any, variable: KerasVariable) -> float | None:
    if not optimizer._use_weight_decay(variable):
        return None
    with_adam = hasattr(optimizer, "adam_weight_decay") and optimizer._should_use_adamw(variable)
    decay = optimizer.adam_weight_decay if with_adam else optimizer.weight_decay
    return None if decay is None else float(decay)


def _spec(number: int, variable: KerasVariable) -> ParameterSpec:
    if is_overwritten(variable):
        raise UnsupportedError(
            f"sharded=True: variable {variable.path!r} is a scale or history of float8, which "
            "cannot be shared: use sharded=False"
        )
    kind = np.dtype(variable.dtype).name if variable.dtype != "bfloat16" else "bfloat16"
    if kind not in ("float32", "float64"):
        raise UnsupportedError(
            f"sharded=True: variable {variable.path!r} is {kind}, and float32 and float64 can be "
            "shared: use sharded=False"
        )
    return ParameterSpec.of_array(f"variable {number}", tuple(variable.shape), kind, kind)
