"""Slices of memory that the ranks of a node share, each of which has one owner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.types import DType

# Slices are whole cache lines of any element type, as in node_kernel.c.
_SLICE_ELEMENTS = 64


def aligned_bounds(count: int, owners: int) -> list[int]:
    """Return the bounds of the owners' slices: `owners` + 1 numbers from 0 to `count`."""
    each = -(-count // owners)
    each = -(-each // _SLICE_ELEMENTS) * _SLICE_ELEMENTS
    return [min(each * owner, count) for owner in range(owners + 1)]


class Slices(ABC):
    """The slices of one communicator's memory.

    Each of the first `owners` ranks of a node owns the slice of its number of every buffer. Buffers
    are in memory that `Communicator.empty` has returned, at the same offset on all ranks, and
    `aligned_bounds` says where their slices begin.
    """

    owners: int
    number: int
    nodes: int
    in_tree: bool
    adds_placed: bool

    @abstractmethod
    def copies(self, memory: Elements) -> list[npt.NDArray[np.uint8]] | None:
        """Return the memory of every rank of the node, as this process accesses it.

        Args:
            memory: [nbytes] uint8, result of `Communicator.empty`.

        Returns:
            [nbytes] uint8 for each rank of the node; None on all ranks if they do not share it.
        """

    @abstractmethod
    @collective
    def reduce(self, buffer: Buffer, prescale: float, postscale: float) -> None:
        """Overwrite this rank's slice with that of the sum over all ranks.

        The result is that of `Communicator.allreduce` in this slice; the rest is undefined.
        """

    @abstractmethod
    def add_placed(
        self,
        rows: npt.NDArray[np.uint64],
        dtype: DType,
        prescales: Sequence[float],
        postscale: float,
    ) -> None:
        """Add pieces of memory that lie elsewhere on each rank of the node.

        targets = postscale * (sources[0] * prescales[0] + sources[1] * prescales[1] + ...), the
        same bits as in `Communicator.allreduce`. A target may be one of the sources.

        Args:
            rows: number of elements of each piece, and addresses of its sources and its targets in
                this process, [pieces, 1 + sources + targets].
        """

    @abstractmethod
    @collective
    def spread(self, buffer: Buffer) -> None:
        """Copy each slice from its owner to all ranks of the node."""

    @abstractmethod
    @collective
    def meet(self) -> None:
        """Wait until all ranks of the node are here; see what they have written."""
