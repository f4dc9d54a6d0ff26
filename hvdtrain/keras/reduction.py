"""The reduction of an optimizer's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.keras.backends.choose import chosen
from hvdtrain.keras.settings import GradientSettings

__all__ = ["Reduction"]


class Reduction:
    """Reduces the gradients of an optimizer.

    Args:
        settings: how gradients are reduced.
        name: of the operation.
        factor: of the gradients, after they are reduced.
        scale_local: divide gradients of local variables by the number of ranks.
    """

    def __init__(
        self, settings: GradientSettings, name: str, factor: float = 1.0, scale_local: bool = True
    ) -> None:
        self._settings, self._name = settings, name
        self._factor, self._scale_local = factor, scale_local
        self._local: dict[int, Any] = {}

    def keep_local(self, variable: Any) -> None:
        """Keep the gradient of a variable on its rank."""
        self._local[id(variable)] = variable  # kept, so that no other one gets its id

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks; None stays None (collective)."""
        results, process_set = list(gradients), self._settings.process_set
        size = process_set.size() if process_set.included() else 1
        present = [i for i, gradient in enumerate(results) if gradient is not None]
        shared = [i for i in present if id(variables[i]) not in self._local]
        if size != 1 and shared:
            reduced = chosen().reduce(
                [results[i] for i in shared],
                [variables[i] for i in shared],
                self._settings,
                self._name,
            )
            for i, gradient in zip(shared, reduced, strict=True):
                results[i] = gradient
        if self._scale_local and size != 1:
            for i in set(present) - set(shared):
                results[i] = keras.ops.divide(results[i], size)
        if self._factor != 1.0:
            for i in present:
                results[i] = keras.ops.multiply(results[i], self._factor)
        return results
