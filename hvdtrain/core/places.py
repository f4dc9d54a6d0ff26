"""Where the ranks of a node have their gradients: in the buckets, or where autograd made them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import Slices, aligned_bounds


@dataclass(frozen=True)
class Pieces:
    """Contiguous elements of gradients, [pieces] each; offsets are in bytes."""

    parameters: np.typing.NDArray[np.int64]
    within: np.typing.NDArray[np.int64]
    in_memory: np.typing.NDArray[np.int64]
    counts: np.typing.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> Pieces:
        """Return pieces from rows of these four numbers."""
        columns = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(*map(np.ascontiguousarray, columns))


class GradientPlaces:
    """The places of all gradients of a node in the present step.

    Each rank says for each gradient where it lies before all ranks meet to reduce it, and leaves it
    there until all have read it.
    """

    def __init__(
        self, slices: Slices, memory: Elements, arena: Elements, table: Elements, parameters: int
    ) -> None:
        self.slices = slices
        self._memory, self._memories = _addresses(slices, memory)
        self._arena, self._arenas = _addresses(slices, arena)
        tables = slices.copies(table)
        assert tables is not None
        # For each gradient its offset in the arena, plus 1; 0 if it is in its bucket.
        self._offsets = [part[: 8 * parameters].view(np.int64) for part in tables]
        numbers = [part[8 * parameters :][:16] for part in tables]
        self._prescales = [part[:8].view(np.float64) for part in numbers]
        # Where each rank has its buckets in its memory, as an offset.
        self._bases = [part[8:].view(np.int64) for part in numbers]
        self._own = self._offsets[slices.number]
        self._own[:] = 0
        self._bases[slices.number][0] = 0

    @staticmethod
    def table_bytes(parameters: int) -> int:
        return 8 * parameters + 16

    def offset(self, bucket: Buffer) -> int:
        """Return the offset of a bucket in the memory of all buckets, in bytes."""
        return bucket.pointer - self._memory

    def put(self, index: int, offset: int | None) -> None:
        """Say where this rank's gradient of a parameter lies."""
        self._own[index] = 0 if offset is None else offset + 1

    def elsewhere(self, index: int) -> int:
        """Return the address of this rank's gradient in the arena; 0 if it is not there."""
        return self._arena + int(self._own[index]) - 1 if self._own[index] else 0

    def addresses(self, pieces: Pieces) -> np.typing.NDArray[np.uint64]:
        """Return the address of each piece on each rank, in this process, [pieces, ranks].

        All ranks have to meet before, when they have said where their gradients lie.
        """
        here, columns = self.bucket_addresses(pieces), []
        for rank, (offsets, arena) in enumerate(zip(self._offsets, self._arenas, strict=True)):
            offset = offsets[pieces.parameters]
            there = (arena - 1 + offset + pieces.within).astype(np.uint64)
            columns.append(np.where(offset, there, here[:, rank]))
        return np.stack(columns, 1)

    def bucket_addresses(self, pieces: Pieces) -> np.typing.NDArray[np.uint64]:
        """Return the address of each piece in the bucket of each rank, [pieces, ranks]."""
        bases = [int(base[0]) for base in self._bases]
        here = pieces.in_memory - bases[self.slices.number]
        columns = [m + base + here for m, base in zip(self._memories, bases, strict=True)]
        return np.stack(columns, 1).astype(np.uint64)

    def put_base(self, offset: int) -> None:
        """Say where in its memory, in bytes, this rank has its first bucket in this step."""
        self._bases[self.slices.number][0] = offset

    def put_prescale(self, prescale: float) -> None:
        """Say which factor this rank's gradients have."""
        self._prescales[self.slices.number][0] = prescale

    def prescales(self) -> list[float]:
        """Return the factors of all ranks, after a meeting."""
        return [float(prescale[0]) for prescale in self._prescales]


def _addresses(slices: Slices, memory: Elements) -> tuple[int, list[int]]:
    """Return the address of a memory, and those of all ranks' as this process accesses them."""
    copies = slices.copies(memory)
    assert copies is not None
    return Buffer.of(memory).pointer, [copy.ctypes.data for copy in copies]


class PlacedBucket:
    """Reduces a bucket whose gradients lie where each rank says."""

    def __init__(
        self, places: GradientPlaces, extents: Mapping[int, tuple[int, int]], buffer: Buffer
    ) -> None:
        self._places, self._extents, self._buffer = places, extents, buffer

    @cached_property
    def _owned(self) -> Pieces:
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
    def reduce(
        self, prescale: float, postscale: float, everywhere: bool, met: bool = False
    ) -> None:
        """Overwrite gradients, wherever they lie, with the sum over the ranks.

        With `met` all ranks have said before where they lie, have this factor, and meet afterwards.
        """
        places, slices = self._places, self._places.slices
        places.put_prescale(prescale)
        if not met:
            slices.meet()
        sources = places.addresses(self._owned)
        targets = self._targets(sources)
        if not everywhere:
            targets = targets[:, [slices.number]]
        rows = np.column_stack([self._owned.counts.astype(np.uint64), sources, targets])
        prescales = [prescale] * sources.shape[1] if met else places.prescales()
        slices.add_placed(rows, self._buffer.dtype, prescales, postscale)
        if everywhere and not met:
            slices.meet()

    def _targets(self, sources: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.uint64]:
        return sources

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


class LentBucket(PlacedBucket):
    """Reduces placed gradients into a bucket for one step; `base`: first bucket's offset, bytes."""

    def __init__(
        self,
        places: GradientPlaces,
        base: int,
        extents: Mapping[int, tuple[int, int]],
        buffer: Buffer,
    ) -> None:
        super().__init__(places, extents, buffer)
        self._base = base
        self._lent: dict[int, tuple[int, int]] = {}

    def lend(self, index: int, address: int, offset: int) -> None:
        """Say that the gradient of a parameter is not in the bucket in this step."""
        self._lent[index] = address, offset

    @collective
    def reduce(
        self, prescale: float, postscale: float, everywhere: bool, met: bool = False
    ) -> None:
        """Fill the bucket with the sum over the ranks; ranks meet, to know where gradients lie."""
        for index in self._extents:
            self._places.put(index, self._lent[index][1] if index in self._lent else None)
        self._places.put_base(self._base)
        super().reduce(prescale, postscale, everywhere)

    def _targets(self, sources: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.uint64]:
        return self._places.bucket_addresses(self._owned)

    @collective
    def spread(self) -> None:
        self._places.slices.spread(self._buffer)

    def _elsewhere(self) -> Iterator[tuple[int, Buffer]]:
        for index, (address, _) in self._lent.items():
            yield address, self._buffer.slice(*self._extents[index])

    def scatter(self) -> None:
        """Leave the results in the bucket."""

    def clear(self) -> None:
        self._lent.clear()
