"""Features that some engines offer: slices of shared memory, votes, messages between two ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.polling import poll_until
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
        """Return each rank's copy, [nbytes] uint8, of `empty`; None on all if it is not shared."""

    @abstractmethod
    @collective
    def reduce(self, buffer: Buffer, prescale: float, postscale: float) -> None:
        """Overwrite this rank's slice with that of an allreduce; the rest is undefined."""

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
        same bits as in `Communicator.allreduce`. A target may be one of the sources. A row has the
        number of elements, then addresses in this process: [pieces, 1 + sources + targets].
        """

    @abstractmethod
    @collective
    def spread(self, buffer: Buffer) -> None:
        """Copy each slice from its owner to all ranks of the node."""

    @abstractmethod
    @collective
    def meet(self) -> None:
        """Wait until all ranks of the node are here; see what they have written."""


class VotedReduction(ABC):
    """Allreduces of one type, reduction and factors that are voted on and run in one call."""

    @abstractmethod
    @collective
    def __call__(self, votes: bytes, pieces: Sequence[int]) -> bytes:
        """Vote, and reduce tensors in host memory if all members vote in this way for the same.

        Return b"" if that is done, else the maxima of all votes: those of `start_max`, which other
        members may call meanwhile. The votes are three hashes of 8 bytes, each followed by its
        complement; all are equal for one tensor. The last one is of what this member votes on.
        """


class Pending(ABC):
    """An operation in progress."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; return whether the operation is complete."""

    def wait(self) -> None:
        """Block until the operation is complete, without keeping a core busy."""
        poll_until(self.test)


class PointToPoint(ABC):
    """Messages between pairs of the ranks of a communicator, apart from its other calls.

    Messages from one rank to another with the same tag arrive in the order in which they were sent.
    Ranks are those among the members; tags are 0 or more. One thread at a time uses it.
    """

    @abstractmethod
    def start_send(self, buffer: Buffer, rank: int, tag: int) -> Pending:
        """Start to send host memory, which must not change until that is complete (local)."""

    @abstractmethod
    def start_receive(self, buffer: Buffer, rank: int, tag: int) -> Pending:
        """Start to overwrite host memory with a message of its type and size (local)."""

    @abstractmethod
    def waiting(self, tag: int) -> int | None:
        """Return a rank from which a message can be received; None if there is none (local)."""

    @abstractmethod
    @collective
    def close(self) -> None:
        """Free its resources (collective)."""


class GatherBytes(Protocol):
    """Gathers one JSON-serializable value per rank, in rank order; tuples may arrive as lists."""

    def __call__(self, value: Any, /) -> list[Any]: ...
