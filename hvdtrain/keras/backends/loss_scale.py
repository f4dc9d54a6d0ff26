"""The base class of distributed optimizers that scale the loss."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from hvdtrain.collective import collective
from hvdtrain.keras.backends.optimizer_mixin import DistributedMixin
from hvdtrain.keras.tensors.types import Tensor, Variable


class LossScaleMixin(DistributedMixin):
    """Base class of distributed LossScaleOptimizers: whether gradients are finite is agreed on.

    They reduce gradients before they look for values that are not finite. If ranks exchange
    weights, each looks at its own gradients, and leaves out an update, but no exchange.
    """

    dynamic_scale: Variable
    initial_scale: float

    @collective
    def stateless_apply(
        self,
        optimizer_variables: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        trainable_variables: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Reduce gradients and return the updated variables."""
        updated: tuple[list[Tensor], list[Tensor]]
        own, reduction = self._trainable_variables, self.hvdtrain_reduction
        if reduction.weights is None:
            mapping = list(zip(self.variables, optimizer_variables, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                reduced = self._reduce(grads, own)
            updated = super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, reduced, trainable_variables
            )
            return updated
        values = [*trainable_variables, *optimizer_variables]
        state = list(zip([*own, *self.variables], values, strict=True))
        with keras.StatelessScope(state_mapping=state) as scope:
            reduction.update_alone(self._update_alone, grads, own, self)
        results = [scope.get_current_value(variable) for variable, _ in state]
        return results[: len(own)], results[len(own) :]

    def _reduce(
        self, grads: Sequence[Tensor | None], variables: Sequence[Variable]
    ) -> list[Tensor | None]:
        exchange = self.exchange
        if exchange is None or not exchange.uses_scale:
            return super()._reduce(grads, variables)
        # What the exchange keeps for later steps must not be in units of this step's scale.
        scale: Tensor | float = self.initial_scale
        if self.built:
            scale = keras.ops.convert_to_tensor(self.dynamic_scale)
        reduced = super()._reduce([_divided(g, scale) for g in grads], variables)
        inverse = keras.ops.divide(1.0, scale)
        return [_divided(gradient, inverse) for gradient in reduced]

    def _update_alone(self, grads: Sequence[Tensor | None]) -> None:
        """Update the variables if the gradients of this rank are finite."""
        own, others = self._trainable_variables, self.variables
        updated = super().stateless_apply(  # type: ignore[misc]
            [keras.ops.convert_to_tensor(variable) for variable in others],
            grads,
            [keras.ops.convert_to_tensor(variable) for variable in own],
        )
        for variable, value in zip([*own, *others], [*updated[0], *updated[1]], strict=True):
            variable.assign(value)


def _divided(gradient: Tensor | None, divisor: Tensor | float) -> Tensor | None:
    return None if gradient is None else keras.ops.divide(gradient, divisor)
