"""The interface that every engine implements: blocking primitives on flat buffers."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.engines.features import Pending, PointToPoint, Slices, VotedReduction
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import DType, ReduceOp


class _AnyDevice(frozenset[str]):
    """A set that contains every device type; listed as "any"."""

    def __contains__(self, device: object) -> bool:
        return True


ANY_DEVICE = _AnyDevice({"any"})


@dataclass(frozen=True)
class Capabilities:
    """What a communicator supports; the core refuses everything else and never casts.

    Attributes:
        reduces: element types that each reduction supports.
        moves: element types that broadcast, allgather and alltoall support.
        devices: supported device types of buffers ("cpu", "cuda"), or ANY_DEVICE.
        concurrent: whether several communicators may be used at once, each by its own thread.
        half_types: whether half types are reduced in place, and multiplied by factors in float32.
        rounds_once: whether half types are then also added in float32 and rounded once, instead of
            after each addition.
        tree_sums: whether allreduce adds floating-point numbers along a binary tree over the ranks,
            neighbors first and an odd one last, whatever their number and location.
        point_to_point: whether there are messages between pairs of ranks.
    """

    reduces: Mapping[ReduceOp, frozenset[DType]]
    moves: frozenset[DType]
    devices: frozenset[str]
    concurrent: bool
    half_types: bool = False
    rounds_once: bool = True
    tree_sums: bool = False
    point_to_point: bool = False

    def unsupported(self, buffer: Buffer, op: ReduceOp | None = None) -> str | None:
        """Return what about a buffer is not supported, or None if it can be moved or reduced.

        Args:
            buffer: buffer to move, or to reduce.
            op: reduction; None for moving.
        """
        if (
            buffer.device != "cpu"
            and (reason := self.unsupported_device(buffer.device)) is not None
        ):
            return reason
        if op is None:
            return None if buffer.dtype in self.moves else f"moving {buffer.dtype.value}"
        if buffer.dtype not in self.reduces.get(op, frozenset()):
            return f"{op.value} of {buffer.dtype.value}"
        return None

    def unsupported_device(self, device: str) -> str | None:
        """Return why memory on a device ("cuda:0") is not supported, or None if it is."""
        if device.partition(":")[0] in self.devices:
            return None
        return f"memory on {device} (takes {', '.join(sorted(self.devices))})"


# For each tensor the addresses of its elements and of the memory for the result, and the number of
# elements: an array of typecode "q".
Pieces: TypeAlias = "array[int]"


class Communicator(ABC):
    """An engine bound to an ordered set of ranks.

    Every method is collective unless it says local: all members call the same methods in the same
    order, from one thread at a time. The core ensures that all members have arrived before any of
    them enters a blocking primitive.

    Attributes:
        rank: rank of this process among the members.
        size: number of members.
        capabilities: what the communicator supports.
    """

    rank: int
    size: int
    capabilities: Capabilities

    @abstractmethod
    @collective
    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        """Start an element-wise maximum over all members, in place.

        Args:
            values: at most 8 numbers, uint64.
        """

    @abstractmethod
    @collective
    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """Reduce in place: buffer = postscale * op over ranks of (prescale_r * buffer_r).

        Factors other than 1 truncate integers. They cannot be applied to bool, nor to half types
        unless `capabilities.half_types` is set.

        Args:
            buffer: elements to reduce, in place.
            op: SUM, MIN, MAX or PRODUCT.
            prescale: factor before the reduction; may differ between ranks.
            postscale: factor after it; equal on all ranks.
        """

    @collective
    def allreduce_from(
        self,
        source: Buffer,
        buffer: Buffer,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Reduce `source` into `buffer`; see `allreduce`.

        Args:
            source: elements to reduce, in host memory; left unchanged.
            buffer: memory for the result, in host memory, of the same type and size.
            op, prescale, postscale: as in `allreduce`.
        """
        buffer.copy_from(source)
        self.allreduce(buffer, op, prescale, postscale)

    @collective
    def allreduce_many(
        self,
        pieces: Pieces,
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> bool:
        """Reduce many tensors in host memory; see `allreduce`.

        Args:
            pieces: tensors; sizes and their order are equal on all members. A source may be its
                result.
            dtype: element type of all.
            op, postscale: as in `allreduce`.
            prescale: factor before the reduction, equal on all members.

        Returns:
            Whether it was done; False, on all members, if the engine has no way of its own.
        """
        return False

    def voted_reduction(
        self, count: int, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> VotedReduction | None:
        """Return an allreduce that is voted on and run in one call; None if there is none (local).

        Args:
            count: number of elements, at least 1.
            dtype: element type, which `capabilities` lists for `op`.
            op, prescale, postscale: as in `allreduce`.
        """
        return None

    @collective
    def vote_on_many(
        self,
        votes: npt.NDArray[np.uint64],
        pieces: Pieces,
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> bool:
        """Vote on the reduction of many tensors, and reduce them at once if that is possible.

        The vote is the maximum that `start_max` computes, which other members may call meanwhile.

        Args:
            votes: 6 numbers, overwritten with the maxima unless the tensors are reduced. The last
                two are a hash of what this member votes on, and its complement.
            pieces, dtype, op, prescale, postscale: as in `allreduce_many`; equal on all members
                whose last two numbers are equal.

        Returns:
            Whether the tensors are reduced, because all members vote in this way for the same.
        """
        self.start_max(votes).wait()
        return False

    @abstractmethod
    @collective
    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        """Overwrite every member's buffer with that of `root_rank`.

        Args:
            buffer: memory to send or to overwrite, of equal type and size on all members.
            root_rank: rank among the members whose buffer is sent.
        """

    @abstractmethod
    @collective
    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        """Concatenate the buffers of all members in rank order.

        Args:
            send: elements of this rank.
            receive: memory for sum(counts) elements.
            counts: number of elements of each rank.
        """

    @abstractmethod
    @collective
    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Send part r of `send` to rank r.

        Args:
            send: parts for all ranks, in rank order.
            receive: memory for the received parts, in rank order.
            send_counts: number of elements for each rank.
            receive_counts: number of elements from each rank.
        """

    @abstractmethod
    @collective
    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """Reduce `send` and store part r of the result in rank r's `receive`.

        Args:
            send: elements to reduce; left unchanged.
            receive: memory for counts[rank] elements.
            counts: number of elements of each rank's part.
            op, prescale, postscale: as in `allreduce`.
        """

    @abstractmethod
    @collective
    def barrier(self) -> None:
        """Block until every member has called it."""

    @abstractmethod
    @collective
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator of the given ranks in that order, or None on other ranks."""

    @collective
    def point_to_point(self) -> PointToPoint:
        """Return messages between pairs of the members, apart from the calls of this object.

        Raises:
            UnsupportedError: the engine has none: `capabilities.point_to_point` is not set.
        """
        raise UnsupportedError(
            f"[rank {self.rank}/{self.size}] the engine has no messages between pairs of ranks"
        )

    @abstractmethod
    @collective
    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        """Allocate uninitialized memory that this communicator reduces fastest.

        Buffers in it must be at the same offset on all members when they are reduced.

        Args:
            nbytes: size in bytes, equal on all members.
            device: device of the memory, as "cpu" or "cuda:0"; its type is one of
                `capabilities.devices`.

        Returns:
            [nbytes] uint8: a numpy array or a torch tensor, depending on the engine; on a device a
            torch tensor.

        Raises:
            UnsupportedError: the engine does not support memory on this device.
        """

    def slices(self) -> Slices | None:
        """Return the slices of memory that the ranks of a node share (local).

        None on all members if they share no memory on any node; by default so.
        """
        return None

    def take_device(self) -> None:  # noqa: B027  # most engines need no device
        """Use the calling thread's current device for memory on "cuda" without an index (local).

        The current device is a property of the thread, and a channel's thread does not know that
        of the program's.
        """

    def native(self, buffer: Buffer) -> Buffer:
        """Return a view of a buffer in the form on which this engine computes (local).

        By default numpy computes on host memory, in the caller's thread, and torch on a device.
        """
        return buffer.host() if buffer.device == "cpu" else buffer

    def _require(self, device: str) -> None:
        """Check that the engine supports memory on a device."""
        if (reason := self.capabilities.unsupported_device(device)) is not None:
            raise UnsupportedError(f"[rank {self.rank}/{self.size}] the engine refuses {reason}")

    def put(self, source: Buffer, buffer: Buffer) -> None:
        """Copy into a buffer that is reduced next (local).

        Args:
            source: elements to copy, in host memory.
            buffer: memory of the same size, in host memory.
        """
        ctypes.memmove(buffer.pointer, source.pointer, source.nbytes)

    @collective  # noqa: B027 - most engines cannot survive a lost rank
    def confirm(self) -> None:
        """Check that all members have got this far, with right results (collective).

        Where others can continue without a rank that ends, calls in which it ends may succeed with
        wrong results.

        Raises:
            RanksLostError: a member has ended.
        """

    def explained(self, error: BaseException) -> BaseException:
        """Return what an error of this communicator means to the program (local).

        Returns:
            A RanksLostError if ranks have ended and the others can continue, otherwise the error.
        """
        return error

    @abstractmethod
    @collective
    def close(self) -> None:
        """Free the communicator; further calls do nothing."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank of the job with this exit code, without waiting for any (local)."""


# Number of a rank that was not in the world before.
JOINED = -1


class Newcomer(ABC):
    """A process that was started to become a rank, on the rank that has started it."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether it waits to be taken in by `Failures.reopen` (local).

        Raises:
            PeerFailureError: it has ended.
        """


class Failures(ABC):
    """The ranks of a world that have ended, where the others can continue without them.

    A rank that notices one calls `revoke`, so that all others notice it, whatever they wait for.
    Each of them then calls `reopen`, and closes the communicators of this world.
    """

    @abstractmethod
    def lost(self) -> tuple[int, ...]:
        """Return the ranks that have ended, as far as this rank knows (local)."""

    @abstractmethod
    def check(self) -> None:
        """Check that no rank has ended, and none has called `revoke` (local).

        Raises:
            RanksLostError: one has.
        """

    @abstractmethod
    def revoke(self) -> None:
        """Have all calls of all ranks on the communicators of this world fail (local).

        They raise an error for which `Communicator.explained` returns a RanksLostError.
        """

    @abstractmethod
    @collective
    def agree(self, value: bool) -> bool:
        """Return whether a value is true on all ranks, none of which has ended (collective).

        The result is the same on all that are left, also after `revoke`. Before that, results of
        other calls may differ between them.
        """

    @abstractmethod
    def start_rank(self, host: str, known: bool) -> Newcomer:
        """Start a process that is to become a rank, while the others continue (local).

        It takes tenths of a second; forever, if the process ends at once.

        Args:
            host: name of its host; "" for any.
            known: whether the launcher was given this host.

        Raises:
            HvdtrainError: it cannot be started.
        """

    @abstractmethod
    @collective
    def reopen(self, newcomer: Newcomer | None = None) -> EngineWorld:
        """Return a world of the ranks that are left, in the same order (collective over them).

        Ranks may end meanwhile.

        Args:
            newcomer: process that becomes the last rank, unless it ends; on the first rank only.

        Raises:
            SystemLimitError: a rank has reached a limit of the system (raised on all ranks).
        """


@dataclass(frozen=True)
class EngineWorld:
    """All ranks of the job, as an engine found them.

    Attributes:
        engine: name of the engine.
        library: name and version of the communication library, for display.
        communicator: communicator of all ranks.
        nodes: node number of each rank; ranks share memory if and only if theirs are equal.
        hostnames: host name of each rank.
        failures: ranks that have ended; None if no rank can continue without another.
        before: number of each rank in the world before this one, or JOINED, or else among the ranks
            that the launcher has started; None if no rank can continue without another.
        joined: whether this rank has joined others that were there before.
    """

    engine: str
    library: str
    communicator: Communicator
    nodes: tuple[int, ...]
    hostnames: tuple[str, ...]
    failures: Failures | None = None
    before: tuple[int, ...] | None = None
    joined: bool = False
