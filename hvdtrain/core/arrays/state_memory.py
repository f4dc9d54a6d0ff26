"""The state of an optimizer of arrays, in memory that all ranks of a node can read (all local)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.core.gradients.plan import BucketPlan, ParameterSpec
from hvdtrain.core.sharding.segments import Quantity, Segment, StateLayout, segments_of


class ArrayStateMemory:
    """What an optimizer keeps for the elements of all variables; 0 at first.

    Any rank reads and writes the whole state between two steps, as checkpoints do. All ranks that
    write it have the same values.
    """

    def __init__(
        self, specs: Sequence[ParameterSpec], quantities: Sequence[str], number: int
    ) -> None:
        self._specs, self._names, self._number = specs, quantities, number
        self._segments: list[list[Segment]] = []
        self._layouts: list[StateLayout] = []
        self._memories: Sequence[HostArray] = ()
        self._waiting: dict[tuple[int, str], HostArray] = {}
        self._factors: dict[tuple[int, str], float] = {}  # for apply_factors()

    def plan(self, plan: BucketPlan, owners: int) -> int:
        """Divide the state, and return the bytes that each owner needs."""
        quantities = [
            {name: Quantity(name, spec.dtype, elementwise=True) for name in self._names}
            for spec in self._specs
        ]
        self._segments = segments_of(plan, owners)
        self._layouts = [StateLayout(own, quantities) for own in self._segments]
        return max(1, *(layout.nbytes for layout in self._layouts))

    def use(self, memories: Sequence[HostArray]) -> None:
        """Move the state to the memory of its owners, which is zero."""
        self._memories = memories
        for (index, name), value in self._waiting.items():
            self._write(index, name, value)
        self._waiting.clear()

    @property
    def owned(self) -> list[Segment]:
        """The segments of this rank, which owns none if there are too many ranks."""
        return self._segments[self._number] if self._number < len(self._segments) else []

    def of(self, segment: Segment) -> list[HostArray]:
        """Return what is kept for a segment of this rank, [count] each."""
        return [self._part(self._number, segment, name) for name in self._names]

    def read(self, index: int, name: str) -> HostArray:
        """Return a copy of what is kept for a variable, in its shape."""
        spec = self._specs[index]
        whole = np.zeros(spec.count, spec.dtype.numpy)
        if (index, name) in self._waiting:
            whole[...] = self._waiting[index, name]
        for segment, part in self._parts(index, name):
            whole[segment.first : segment.first + segment.count] = part
        if (factor := self._factors.get((index, name))) is not None:
            whole *= whole.dtype.type(factor)
        return whole.reshape(spec.shape)

    def write(self, index: int, name: str, value: HostArray) -> None:
        """Replace what is kept for a variable."""
        self._factors.pop((index, name), None)
        whole = np.array(value, self._specs[index].dtype.numpy).reshape(-1)
        if self._memories:
            self._write(index, name, whole)
        else:
            self._waiting[index, name] = whole

    def _write(self, index: int, name: str, whole: HostArray) -> None:
        for segment, part in self._parts(index, name):
            part[...] = whole[segment.first : segment.first + segment.count]

    def scale(self, index: int, name: str, factor: float) -> None:
        """Multiply what is kept for a variable, as far as this rank reads it and steps with it.

        Another rank may still be reading the whole state, so that the memory changes in the next
        step only; see apply_factors().
        """
        self._factors[index, name] = self._factors.get((index, name), 1.0) * factor

    def apply_factors(self) -> None:
        """Multiply the segments of this rank, in a step, when no rank reads the state."""
        for segment in self.owned:
            for name in self._names:
                factor = self._factors.get((segment.parameter, name))
                if factor is not None:
                    part = self._part(self._number, segment, name)
                    part *= part.dtype.type(factor)
        self._factors.clear()

    def _parts(self, index: int, name: str) -> Iterator[tuple[Segment, HostArray]]:
        if not self._memories:
            return
        for owner, layout in enumerate(self._layouts):
            number = layout.numbers.get(index)
            if number is not None:
                segment = self._segments[owner][number]
                yield segment, self._part(owner, segment, name)

    def _part(self, owner: int, segment: Segment, name: str) -> HostArray:
        dtype = self._specs[segment.parameter].dtype
        start = self._layouts[owner].offsets[segment.parameter, name]
        part = self._memories[owner][start : start + segment.count * dtype.itemsize]
        return part.view(dtype.numpy)
