"""A bucket of which some gradients lie elsewhere, and are reduced where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.places.places import GradientPlaces, Pieces
from hvdtrain.engines.slices import aligned_bounds


class PlacedBucket:
    """Reduces a bucket whose gradients lie where each rank says."""

    def __init__(
        self, places: GradientPlaces, extents: Mapping[int, tuple[int, int]], buffer: Buffer
    ) -> None:
        self._places, self._extents, self._buffer = places, extents, buffer

    @cached_property
    def _owned(self) -> Pieces:
        """The pieces of this rank's slice."""
        slices = self._places.slices
        if slices.number >= slices.owners:
            return Pieces.of([])
        low, high = aligned_bounds(self._buffer.count, slices.owners)[slices.number :][:2]
        size, memory = self._buffer.dtype.itemsize, self._places.offset(self._buffer)
        rows = []
        for index, (begin, count) in self._extents.items():
            start, end = max(low, begin), min(high, begin + count)
            if start < end:
                rows.append((index, (start - begin) * size, memory + start * size, end - start))
        return Pieces.of(rows)

    @collective
    def reduce(self, prescale: float, postscale: float, everywhere: bool) -> None:
        """Overwrite gradients, wherever they lie, with the sum over the ranks."""
        places, slices = self._places, self._places.slices
        places.put_prescale(prescale)
        slices.meet()
        sources = places.addresses(self._owned)
        targets = sources if everywhere else sources[:, [slices.number]]
        rows = np.column_stack([self._owned.counts.astype(np.uint64), sources, targets])
        slices.add_placed(rows, self._buffer.dtype, places.prescales(), postscale)
        if everywhere:
            slices.meet()

    @collective
    def spread(self) -> None:
        """Copy each slice from its owner to all ranks of the node."""
        slices = self._places.slices
        addresses = self._places.addresses(self._owned)
        source = addresses[:, [slices.number]]
        others = np.delete(addresses, slices.number, 1)
        rows = np.column_stack([self._owned.counts.astype(np.uint64), source, others])
        slices.add_placed(rows, self._buffer.dtype, [1.0], 1.0)
        slices.meet()

    def gather(self) -> None:
        """Copy gradients that lie elsewhere into the bucket."""
        for address, part in self._elsewhere():
            ctypes.memmove(part.pointer, address, part.nbytes)

    def scatter(self) -> None:
        """Copy them back from the bucket."""
        for address, part in self._elsewhere():
            ctypes.memmove(address, part.pointer, part.nbytes)

    def _elsewhere(self) -> Iterator[tuple[int, Buffer]]:
        """Yield the address of each gradient that lies elsewhere, and its part of the bucket."""
        for index, (start, count) in self._extents.items():
            if address := self._places.elsewhere(index):
                yield address, self._buffer.slice(start, count)

    def clear(self) -> None:
        """Let all gradients of this rank lie in the bucket."""
        for index in self._extents:
            self._places.put(index, None)
