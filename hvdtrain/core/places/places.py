"""Where the ranks of a node have their gradients: in the buckets, or where autograd made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.engines.slices import Slices


@dataclass(frozen=True)
class Pieces:
    """Contiguous elements of gradients.

    Attributes:
        parameters: index of the parameter of each piece in the plan, [pieces].
        within: offset of each piece in its gradient, in bytes, [pieces].
        in_memory: offset of its place in this rank's memory of all buckets, in bytes, [pieces].
        counts: number of elements of each piece, [pieces].
    """

    parameters: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]
    in_memory: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

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
        """Return the size of the table for this number of parameters."""
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

    def addresses(self, pieces: Pieces) -> npt.NDArray[np.uint64]:
        """Return the address of each piece on each rank, in this process, [pieces, ranks].

        All ranks have to meet before, when they have said where their gradients lie.
        """
        here, columns = self.bucket_addresses(pieces), []
        for rank, (offsets, arena) in enumerate(zip(self._offsets, self._arenas, strict=True)):
            offset = offsets[pieces.parameters]
            there = (arena - 1 + offset + pieces.within).astype(np.uint64)
            columns.append(np.where(offset, there, here[:, rank]))
        return np.stack(columns, 1)

    def bucket_addresses(self, pieces: Pieces) -> npt.NDArray[np.uint64]:
        """Return the address of each piece in the bucket of each rank, [pieces, ranks]."""
        bases = [int(base[0]) for base in self._bases]
        here = pieces.in_memory - bases[self.slices.number]
        columns = [m + base + here for m, base in zip(self._memories, bases, strict=True)]
        return np.stack(columns, 1).astype(np.uint64)

    def put_base(self, offset: int) -> None:
        """Say where in its memory this rank has its buckets in this step.

        Args:
            offset: offset of the first of them, in bytes.
        """
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
