"""The contract that every engine fulfils: blocking, flat primitives on buffers."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.errors import UnsupportedError
from hvdtrain.patience import wait_patiently
from hvdtrain.types import DType, ReduceOp

__all__ = ["ANY_DEVICE", "Capabilities", "Communicator", "EngineWorld", "Pending"]


class _AnyDevice(frozenset[str]):
    """A set that every type of device is in; listed as "any"."""

    def __contains__(self, device: object) -> bool:
        return True


ANY_DEVICE = _AnyDevice({"any"})


@dataclass(frozen=True)
class Capabilities:
    """What a communicator takes; everything else is refused by the core, never cast.

    Attributes:
        reduces: element types that each reduction takes.
        moves: element types that broadcast, allgather and alltoall take.
        devices: types of the devices where buffers may lie ("cpu", "cuda"), or ANY_DEVICE.
        concurrent: several communicators may be used at once, each by a thread of its own.
        halves: half types are reduced where they lie, and multiplied by factors in float32.
        rounds_once: then they are added in float32, too, and rounded once, instead of each time.
        trees: allreduce adds fractional numbers along a binary tree over the ranks, neighbours
            first and an odd one last, whatever their number and place.
    """

    reduces: Mapping[ReduceOp, frozenset[DType]]
    moves: frozenset[DType]
    devices: frozenset[str]
    concurrent: bool
    halves: bool = False
    rounds_once: bool = True
    trees: bool = False

    def objection(self, buffer: Buffer, op: ReduceOp | None = None) -> str | None:
        """Return why this buffer cannot be moved (or reduced by `op`), or None if it can."""
        if buffer.device != "cpu" and (objection := self.objection_to(buffer.device)) is not None:
            return objection
        if op is None:
            return None if buffer.dtype in self.moves else f"moving {buffer.dtype.value}"
        if buffer.dtype not in self.reduces.get(op, frozenset()):
            return f"{op.value} of {buffer.dtype.value}"
        return None

    def objection_to(self, device: str) -> str | None:
        """Return why memory on a device ("cuda:0") is refused, or None if it is taken."""
        if device.partition(":")[0] in self.devices:
            return None
        return f"memory on {device} (takes {', '.join(sorted(self.devices))})"


class Pending(ABC):
    """An operation that has been started."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; return whether the operation is complete."""

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
        buffer.copy_from(source)
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
    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        """Return uninitialised bytes that this communicator reduces fastest.

        They are an array of numpy's or a tensor of torch's, as the engine likes best; on a device
        a tensor. Every member asks for the same size. A buffer in it lies at one offset on all
        members when they reduce it.

        Args:
            nbytes: how many.
            device: where, as "cpu" or "cuda:0"; its type is one of `capabilities.devices`.

        Raises:
            UnsupportedError: the engine takes no memory there.
        """

    def take_device(self) -> None:  # noqa: B027  # most engines leave it to whoever has tensors
        """Note the calling thread's current device for memory on "cuda" without a number (local).

        Each thread of a process has one of its own, and that of a channel knows no other.
        """

    def native(self, buffer: Buffer) -> Buffer:
        """View a buffer as memory of the kind that this engine computes on (local).

        Host memory is numpy's, in the caller's thread, and on a device it is the tensor.
        """
        return buffer.host() if buffer.device == "cpu" else buffer

    def _require(self, device: str) -> None:
        """Refuse to make memory where the engine takes none."""
        if (objection := self.capabilities.objection_to(device)) is not None:
            raise UnsupportedError(f"[rank {self.rank}/{self.size}] the engine refuses {objection}")

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
