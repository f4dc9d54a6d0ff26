"""What an exchange keeps of each parameter from step to step."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.arrays import Array, HostArray, like, to_host, zeros_like

__all__ = ["ParameterState"]


class ParameterState:
    """One array for each parameter, zeros at first, on the device of its bucket.

    What is put for a step counts from the end of the step on, and only if that was a good one.

    Args:
        name: of the quantity, in checkpoints.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._arrays: dict[int, Array] = {}
        self._new: dict[int, Array] = {}
        self._loaded: dict[int, HostArray] = {}

    def get(self, index: int, model: Array) -> Array:
        """Return a parameter's array; one that is new has the shape, type and device of `model`."""
        if index in self._loaded:
            self._arrays[index] = like(self._loaded.pop(index), model)
        return self._arrays.setdefault(index, zeros_like(model))

    def put(self, index: int, array: Array) -> None:
        """Keep an array, which is the state's own from now on, when the step ends."""
        self._new[index] = array

    def end(self, keep: bool = True) -> None:
        """Let count what was put since the last end, or forget it."""
        if keep:
            self._arrays |= self._new
        self._new = {}

    def arrays(self) -> dict[str, HostArray]:
        """Return copies by name, for a checkpoint."""
        kept = self._loaded | {index: to_host(array) for index, array in self._arrays.items()}
        return {f"{self._name}.{index}": array for index, array in kept.items()}

    def load(self, arrays: Mapping[str, HostArray]) -> None:
        """Take what arrays() has returned; arrays of other names are not this one's."""
        self._arrays, self._new, self._loaded = {}, {}, {}
        for name, array in arrays.items():
            quantity, _, index = name.rpartition(".")
            if quantity == self._name:
                self._loaded[int(index)] = array
