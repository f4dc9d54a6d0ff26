"""The contract that every engine fulfils: blocking, flat primitives on buffers."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.patience import wait_patiently
from hvdtrain.types import DType, ReduceOp

__all__ = ["Capabilities", "Communicator", "EngineWorld", "Pending"]


@dataclass(frozen=True)
class Capabilities:
    """What a communicator takes; everything else is refused by the core, never cast.

    Attributes:
        reduces: element types that each reduction takes.
        moves: element types that broadcast, allgather and alltoall take.
        devices: where buffers may lie ("cpu", "cuda").
        concurrent: several communicators may be used at once, each by a thread of its own.
        halves: half types are reduced where they lie: multiplied by factors and added in
            float32, and rounded once.
        trees: allreduce adds fractional numbers along a binary tree over the ranks, neighbours
            first and an odd one last, whatever their number and place.
    """

    reduces: Mapping[ReduceOp, frozenset[DType]]
    moves: frozenset[DType]
    devices: frozenset[str]
    concurrent: bool
    halves: bool = False
    trees: bool = False

    def objection(self, buffer: Buffer, op: ReduceOp | None = None) -> str | None:
        """Return why this buffer cannot be moved (or reduced by `op`), or None if it can."""
        if buffer.device.split(":")[0] not in self.devices:
            return f"memory on {buffer.device} (takes {', '.join(sorted(self.devices))})"
        if op is None:
            return None if buffer.dtype in self.moves else f"moving {buffer.dtype.value}"
        if buffer.dtype not in self.reduces.get(op, frozenset()):
            return f"{op.value} of {buffer.dtype.value}"
        return None


class Pending(ABC):
    """An operation that has been started."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; tell whether the operation is complete."""

    def wait(self) -> None:
        """Block until the operation is complete, without burning a core meanwhile."""
        wait_patiently(self.test)


class Communicator(ABC):
    """An engine bound to an ordered set of ranks.

    Every method but `abort` is collective: each member calls the same methods in
    the same order, from one thread at a time. The core makes sure that all members have
    arrived before any of them enters a blocking primitive.
    """

    rank: int
    size: int
    capabilities: Capabilities

    @abstractmethod
    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        """Start an element-wise MAX of at most 8 numbers over all members, in place."""

    @abstractmethod
    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """Reduce in place: buffer = postscale * op over ranks of (prescale_r * buffer_r).

        `op` is SUM, MIN, MAX or PRODUCT. Factors other than 1 truncate integers, and cannot be
        applied to bool, nor to half types but where `capabilities.halves` says so.
        `prescale` may differ between ranks, `postscale` may not.
        """

    def allreduce_from(
        self,
        source: Buffer,
        buffer: Buffer,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Reduce `source` into `buffer`, both in host memory; see `allreduce`."""
        buffer.array()[:] = source.array()
        self.allreduce(buffer, op, prescale, postscale)

    @abstractmethod
    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        """Overwrite every member's buffer with that of `root_rank`."""

    @abstractmethod
    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        """Concatenate all members' `send` (of `counts[r]` elements) in `receive`, by rank."""

    @abstractmethod
    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Send part r of `send` to rank r; `receive` holds the parts received, by rank."""

    @abstractmethod
    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Reduce `send` and keep part r (of `counts[r]` elements) in rank r's `receive`.

        `send` is left as it was; factors are as in `allreduce`.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every member has called it."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Make a communicator of `ranks` (of this one, in that order); None on other ranks."""

    @abstractmethod
    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return uninitialised memory that this communicator reduces fastest.

        Every member asks for the same size. A buffer in it lies at one offset on all members
        when they reduce it.
        """

    def put(self, source: Buffer, buffer: Buffer) -> None:
        """Copy `source` into `buffer`, which is reduced next; both in host memory (local)."""
        ctypes.memmove(buffer.pointer, source.pointer, source.nbytes)

    @abstractmethod
    def close(self) -> None:
        """Give the communicator back; calling it again does nothing."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the job with exit code `code`, without waiting for any (local)."""


@dataclass(frozen=True)
class EngineWorld:
    """All ranks of the job, as an engine found them.

    Attributes:
        engine: name of the engine.
        library: name and version of what moves the bytes, for people.
        communicator: all ranks.
        nodes: for each rank a number that is equal exactly for ranks that share memory.
        hostnames: for each rank its host name.
    """

    engine: str
    library: str
    communicator: Communicator
    nodes: tuple[int, ...]
    hostnames: tuple[str, ...]
