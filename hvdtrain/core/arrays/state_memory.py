"""What a shared optimizer keeps for a variable, in memory that all ranks of a node read (local)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.arrays import HostArray
from hvdtrain.core.sharding.segments import Segment


class KeptArray:
    """One number for each element of a variable; 0 at first.

    Any rank reads and writes the whole array between two steps, as checkpoints do. All ranks that
    write it have the same values.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._value: HostArray | None = None  # until there is memory of the node
        self._parts: Sequence[tuple[Segment, HostArray]] = ()
        self._own: HostArray | None = None
        self._factor: float | None = None

    def move(self, parts: Sequence[tuple[Segment, HostArray]], own: HostArray | None) -> None:
        """Keep the array in memory of its owners, which is zero; `own` is the part of this rank."""
        self._parts, self._own = parts, own
        if self._value is not None:
            self._write(self._value)
        self._value = None

    def read(self) -> HostArray:
        """Return a copy."""
        whole = np.zeros(self.shape, self.dtype) if self._value is None else self._value.copy()
        elements = whole.reshape(-1)
        for segment, part in self._parts:
            elements[segment.in_parameter] = part
        if self._factor is not None:
            elements *= elements.dtype.type(self._factor)
        return whole

    def write(self, value: HostArray) -> None:
        """Replace the array."""
        self._factor = None
        if self._parts:
            self._write(value)
        else:
            self._value = np.array(value, self.dtype)

    def _write(self, value: HostArray) -> None:
        elements = value.reshape(-1)
        for segment, part in self._parts:
            part[...] = elements[segment.in_parameter]

    def scale(self, factor: float) -> None:
        """Multiply the array (between two steps; by the same factor on all ranks).

        Another rank may still be reading the whole array, so that the memory changes in the next
        step only; see apply_factor(). Until then read() multiplies.
        """
        self._factor = (1.0 if self._factor is None else self._factor) * factor

    def apply_factor(self) -> None:
        """Multiply the part of this rank, in a step, when no rank reads the array."""
        if self._factor is not None and self._own is not None:
            self._own *= self._own.dtype.type(self._factor)
        self._factor = None
