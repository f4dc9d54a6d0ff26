"""The trained parameters of a model in a row, as servers and workers exchange them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.train.parameter_server.wire import Flat

_TYPES = ("float32", "float64")


class ParameterRow(ABC):
    """Copies of a model's trained parameters and their gradients in host memory.

    Attributes:
        weights: memory for their values, one after the other, [n].
        gradients: memory for their gradients, [n].
    """

    def __init__(self, sizes: Sequence[int], types: Sequence[str]) -> None:
        found = sorted(set(types))
        if len(found) != 1 or found[0] not in _TYPES:
            raise UsageError(
                f"a parameter server needs trained parameters of one type, {' or '.join(_TYPES)}, "
                f"got {' and '.join(found) or 'no parameter'}"
            )
        self.sizes = list(sizes)
        self.weights: Flat = np.zeros(sum(sizes), found[0])
        self.gradients: Flat = np.zeros_like(self.weights)

    @abstractmethod
    def read_weights(self) -> None:
        """Copy the parameters to `weights`."""

    @abstractmethod
    def write_weights(self) -> None:
        """Copy `weights` to the parameters."""

    @abstractmethod
    def read_gradients(self) -> None:
        """Copy the gradients to `gradients`; a parameter without one counts as 0."""
