"""A filled bucket and the parameters in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hvdtrain.arrays import Array, elements_of, strided
from hvdtrain.buffer import Buffer
from hvdtrain.core.gradients.plan import Bucket, ParameterSpec
from hvdtrain.core.places.placed_bucket import PlacedBucket

__all__ = ["FilledBucket", "ParameterSlice", "ParameterView"]


@dataclass(frozen=True)
class ParameterView:
    """A parameter's elements in a bucket.

    Attributes:
        name: name of the parameter.
        index: index of the parameter in the plan.
        start: its first element in the bucket.
        count: number of its elements.
        array: view of the elements in the shape of the parameter.
    """

    name: str
    index: int
    start: int
    count: int
    array: Array


@dataclass(frozen=True)
class ParameterSlice:
    """Contiguous elements of one parameter.

    Attributes:
        name: name of the parameter.
        index: index of the parameter in the plan.
        first: position of the first of them among the parameter's elements.
        count: number of elements of the whole parameter.
        elements: view of the elements, 1-d.
    """

    name: str
    index: int
    first: int
    count: int
    elements: Array


@dataclass(frozen=True)
class FilledBucket:
    """A filled bucket and its layout.

    Attributes:
        number: number of the bucket in the plan.
        buffer: memory of the whole bucket.
        layout: positions of the parameters in the bucket.
        specs: parameters of the plan.
        filled_at: when the program had filled it (time.perf_counter); on a device, when it had
            queued that.
        placed: the bucket, if some of its gradients may lie elsewhere.
    """

    number: int
    buffer: Buffer
    layout: Bucket = field(repr=False)
    specs: Sequence[ParameterSpec] = field(repr=False)
    filled_at: float = field(default=0.0, repr=False)
    placed: PlacedBucket | None = field(default=None, repr=False)

    @cached_property
    def elements(self) -> Array:
        """View of all elements, 1-d."""
        return elements_of(self.buffer)

    @cached_property
    def parts(self) -> list[ParameterView]:
        """Views of the parameters' elements, in the shapes of the parameters."""
        parts = []
        for index, start in zip(self.layout.parameters, self.layout.starts, strict=True):
            spec = self.specs[index]
            array = strided(self.elements, start, spec.count, spec.shape, spec.strides)
            parts.append(ParameterView(spec.name, index, start, spec.count, array))
        return parts

    def section(self, first: int, last: int) -> FilledBucket:
        """Return some neighboring parameters as a bucket of its own, which shares its memory.

        Args:
            first, last: numbers of the first and the last parameter in the bucket.
        """
        layout, parts = self.layout, slice(first, last + 1)
        starts = layout.starts[parts]
        count = starts[-1] + self.specs[layout.parameters[last]].count - starts[0]
        section = Bucket(
            layout.parameters[parts],
            tuple(start - starts[0] for start in starts),
            count,
            layout.dtype,
            layout.device,
        )
        buffer = self.buffer.slice(starts[0], count)
        return FilledBucket(self.number, buffer, section, self.specs, self.filled_at)

    def pieces(self, elements: Array, start: int) -> list[ParameterSlice]:
        """Split a slice of the bucket at the bounds of its parameters.

        Args:
            elements: elements of the slice, 1-d.
            start: position of the slice in the bucket.
        """
        end = start + elements.shape[0]
        pieces = []
        for index, begin in zip(self.layout.parameters, self.layout.starts, strict=True):
            spec = self.specs[index]
            low, high = max(start, begin), min(end, begin + spec.count)
            if low < high:
                view = elements[low - start : high - start]
                pieces.append(ParameterSlice(spec.name, index, low - begin, spec.count, view))
        return pieces
