"""A bucket into which gradients are added that lie elsewhere, and stay as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.places.placed_bucket import PlacedBucket
from hvdtrain.core.places.places import GradientPlaces


class LentBucket(PlacedBucket):
    """Reduces a bucket whose gradients lie where each rank says; the results are in the bucket.

    There is one for each step, so that threads may prepare steps while others are reduced.

    Args:
        base: offset of the first bucket in this rank's memory, in bytes.
    """

    def __init__(
        self,
        places: GradientPlaces,
        extents: Mapping[int, tuple[int, int]],
        buffer: Buffer,
        base: int,
    ) -> None:
        super().__init__(places, extents, buffer)
        self._base = base
        self._lent: dict[int, tuple[int, int]] = {}

    def lend(self, index: int, address: int, offset: int) -> None:
        """Say that the gradient of a parameter is not in the bucket in this step."""
        self._lent[index] = address, offset

    @collective
    def reduce(self, prescale: float, postscale: float, everywhere: bool) -> None:
        """Fill the bucket with the sum over the ranks; see PlacedBucket.reduce."""
        places, slices = self._places, self._places.slices
        for index in self._extents:
            places.put(index, self._lent[index][1] if index in self._lent else None)
        places.put_base(self._base)
        places.put_prescale(prescale)
        slices.meet()
        sources, targets = places.addresses(self._owned), places.bucket_addresses(self._owned)
        if not everywhere:
            targets = targets[:, [slices.number]]
        rows = np.column_stack([self._owned.counts.astype(np.uint64), sources, targets])
        slices.add_placed(rows, self._buffer.dtype, places.prescales(), postscale)
        if everywhere:
            slices.meet()

    @collective
    def spread(self) -> None:
        """Copy each slice from its owner to all ranks of the node."""
        self._places.slices.spread(self._buffer)

    def gather(self) -> None:
        """Copy gradients that lie elsewhere into the bucket."""
        for index, (address, _) in self._lent.items():
            start, count = self._extents[index]
            part = self._buffer.slice(start, count)
            ctypes.memmove(part.pointer, address, part.nbytes)

    def scatter(self) -> None:
        """Leave the results in the bucket."""

    def clear(self) -> None:
        """Let all gradients of this rank lie in the bucket."""
        self._lent.clear()
