"""Variables of an optimizer whose values lie in memory of the node."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.state_memory import StateMemory
from hvdtrain.keras.tensors.arrays import to_array
from hvdtrain.keras.tensors.types import Tensor, Variable


class StateVariable:
    """What a shared optimizer keeps for a variable of the model, in place of a keras.Variable.

    Any rank reads the whole value between two steps. All ranks that assign one assign the same.
    """

    trainable = False

    def __init__(self, reference: Variable, quantity: str, path: str) -> None:
        self.path, self.name = path, path.rpartition("/")[2]
        self.shape, self.dtype = tuple(reference.shape), reference.dtype
        self._quantity = quantity
        self._place: tuple[StateMemory, int] | None = None
        self._value: HostArray | None = None

    def move(self, memory: StateMemory, index: int) -> None:
        """Keep the value in a memory from now on."""
        self._place = memory, index
        if self._value is not None:
            memory.write(index, self._quantity, self._value)
        self._value = None

    def numpy(self) -> HostArray:
        """Return a copy of the value."""
        if self._place is not None:
            memory, index = self._place
            return memory.read(index, self._quantity)
        return np.zeros(self.shape, self.dtype) if self._value is None else self._value.copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        return self.numpy().astype(dtype or self.dtype, copy=False)

    def scale(self, factor: float) -> None:
        """Multiply the value (between two steps; by the same factor on all ranks)."""
        if self._place is not None:
            memory, index = self._place
            memory.scale(index, self._quantity, factor)
        elif self._value is not None:
            self._value *= self._value.dtype.type(factor)

    def assign(self, value: Tensor | HostArray) -> None:
        """Overwrite the value (local; between two steps)."""
        array = to_array(value)
        if array.shape != self.shape:
            raise ValueError(f"{self.path} has shape {self.shape}, got {array.shape}")
        if self._place is not None:
            memory, index = self._place
            memory.write(index, self._quantity, array)
        else:
            self._value = array.copy()
