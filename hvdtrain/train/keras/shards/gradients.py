"""A Keras optimizer that keeps gradients: how a compiled step hands them out, on every backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from hvdtrain.keras.tensors.types import Tensor, Variable


class GradientCollector(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Keeps the gradients of a step, and leaves the variables as they are."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        super().__init__(learning_rate=0.0, name="gradients")
        self.build(list(variables))

    def build(self, variables: list[Variable]) -> None:
        """Make the variables for the gradients."""
        super().build(variables)
        self.gradients: list[Any] = [
            self.add_variable_from_reference(variable, name="gradient") for variable in variables
        ]

    def apply(
        self,
        grads: Sequence[Tensor | None],
        trainable_variables: Iterable[Variable] | None = None,
    ) -> None:
        """Keep gradients."""
        for kept, gradient in zip(self.gradients, grads, strict=True):
            kept.assign(keras.ops.zeros_like(kept) if gradient is None else gradient)
