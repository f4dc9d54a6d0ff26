"""State that an exchange keeps for each parameter from step to step."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.arrays import Array, HostArray, copy, like, to_host, zeros_like
from hvdtrain.core.gradients.filled_bucket import FilledBucket

__all__ = ["ParameterState"]


class ParameterState:
    """One array for each parameter, initially zeros, on the device of its bucket.

    Arrays that are put during a step take effect at the end of the step, and only if it is valid.

    Args:
        name: name of the quantity in checkpoints.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._arrays: dict[int, Array] = {}
        self._new: dict[int, Array] = {}
        self._loaded: dict[int, HostArray] = {}

    def holds(self, index: int) -> bool:
        """Return whether the array of a parameter was ever put or loaded."""
        return index in self._arrays or index in self._loaded

    def get(self, index: int, model: Array) -> Array:
        """Return the array of a parameter.

        Args:
            index: index of the parameter in the plan.
            model: array with the shape, dtype and device of a new array.
        """
        if index in self._loaded:
            self._arrays[index] = like(self._loaded.pop(index), model)
        elif index not in self._arrays:
            self._arrays[index] = zeros_like(model)
        return self._arrays[index]

    def put(self, index: int, array: Array) -> None:
        """Replace the array of a parameter when the step ends.

        Args:
            index: index of the parameter in the plan.
            array: new array, which must not be modified afterwards.
        """
        self._new[index] = array

    def keep(self, bucket: FilledBucket) -> None:
        """Replace the arrays of a bucket's parameters by copies of their elements, at once."""
        self._arrays |= {part.index: copy(part.array) for part in bucket.parts}

    def end(self, keep: bool = True) -> None:
        """Accept the arrays that were put during the step, or discard them."""
        if keep:
            self._arrays |= self._new
        self._new = {}

    def arrays(self) -> dict[str, HostArray]:
        """Return copies of all arrays by name, for a checkpoint."""
        kept = self._loaded | {index: to_host(array) for index, array in self._arrays.items()}
        return {f"{self._name}.{index}": array for index, array in kept.items()}

    def load(self, arrays: Mapping[str, HostArray]) -> None:
        """Restore arrays that arrays() has returned; those of other quantities are ignored."""
        self._arrays, self._new, self._loaded = {}, {}, {}
        for name, array in arrays.items():
            quantity, _, index = name.rpartition(".")
            if quantity == self._name:
                self._loaded[int(index)] = array
