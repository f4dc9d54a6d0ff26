"""The variables of a Keras optimizer, by the variable that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.train.parameter_server.states import State

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
