"""The interface that every engine implements: blocking primitives on flat buffers."""

from __future__ import annotations

import ctypes
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct
from typing import Any, Protocol, TypeAlias

import numpy as np

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import DType, ReduceOp

_SPIN_SECONDS = 100e-6
_SHORTEST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 5e-3


def pause_seconds(waited: float) -> float:
    """Return how long to sleep before looking again, after having waited for `waited` seconds.

    Peers nearly always arrive within the 100 us without sleep. After that it is a fiftieth of the
    time waited so far, at most 5 ms; waiting inside MPI would keep a core busy.
    """
    if waited <= _SPIN_SECONDS:
        return 0.0
    return min(max(waited / 50, _SHORTEST_SLEEP_SECONDS), _LONGEST_SLEEP_SECONDS)


def poll_until(test: Callable[[], bool]) -> None:
    """Call `test` until it returns true, and sleep between the calls; see `pause_seconds`."""
    started = time.perf_counter()
    while not test():
        if pause := pause_seconds(time.perf_counter() - started):
            time.sleep(pause)


class _AnyDevice(frozenset[str]):
    """A set that contains every device type; listed as "any"."""

    def __contains__(self, device: object) -> bool:
        return True


ANY_DEVICE = _AnyDevice({"any"})

COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
# What engines reduce that know real numbers only, and add the parts of complex ones separately.
REDUCES_REAL = dict.fromkeys(
    (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT), frozenset(DType) - COMPLEX
) | {ReduceOp.SUM: frozenset(DType)}


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
        """Return why a buffer cannot be reduced, or moved if `op` is None; None if it can be."""
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


# Gathers one JSON-serializable value per rank, in rank order; tuples may arrive as lists.
Gather: TypeAlias = Callable[[Any], list[Any]]

# Calls that vote and wait. The first takes a ballot, the number of an operation without a name or
# 0, and the address of the elements; the second one that of memory for the result, and returns
# VOTE_DONE or what `finish` takes.
VoteCalls: TypeAlias = tuple[Callable[[bytes, int, int], None], Callable[[int], int]]
VOTE_DONE = 1  # as in node/task.h


class VotedReduction(Protocol):
    """Votes on allreduces of one type, and runs them: see `Communicator.voted_reduction`."""

    @collective
    def __call__(self, votes: bytes, pieces: Sequence[int], /) -> bytes:
        """Vote, and reduce if all vote for the same; return b"" then, else the maxima."""

    def calls(self, count: int) -> VoteCalls | None:
        """Return calls that vote on one tensor, and wait for members but a moment (local)."""

    @collective
    def finish(self, verdict: int) -> bytes:
        """Wait for the vote that such calls have begun; return b"" or the maxima."""


# What `gather_bytes` sends first, and the number of bytes in it.
_BLOCK_BYTES = 512
_SIZE = Struct("=q")


class Communicator(ABC):
    """An engine bound to an ordered set of ranks, among which this process is `rank` of `size`.

    Every method is collective unless it says local: all members call the same methods in the same
    order, from one thread at a time. The core ensures that all members have arrived before any of
    them enters a blocking primitive.
    """

    rank: int
    size: int
    capabilities: Capabilities

    @abstractmethod
    @collective
    def start_max(self, values: np.typing.NDArray[np.uint64]) -> Pending:
        """Start an element-wise maximum of at most 8 numbers over all members, in place."""

    @abstractmethod
    @collective
    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        """Reduce in place: buffer = postscale * op over ranks of (prescale_r * buffer_r).

        `op` is SUM, MIN, MAX or PRODUCT; `postscale` is equal on all ranks. Factors other than 1
        truncate integers. They cannot be applied to bool, nor to half types unless
        `capabilities.half_types` is set.
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
        """Reduce `source` into `buffer`, both in host memory; see `allreduce`."""
        buffer.copy_from(source)
        self.allreduce(buffer, op, prescale, postscale)

    def voted_reduction(
        self, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> VotedReduction | None:
        """Return a call that votes on allreduces of one type, and runs them, or None (local).

        It reduces tensors in host memory if all members vote in this way for the same. The result
        is b"" if that is done, else the maxima of all votes: those of `start_max`, which other
        members may call meanwhile. The votes are three hashes of 8 bytes, each followed by its
        complement; all are equal for one tensor. The last one is of what this member votes on. The
        second argument has, for each tensor, the addresses of its elements and of the memory for
        the result, which may be one, and the number of elements, which is equal on all members.

        `dtype` is one that `capabilities` lists for `op`.
        """
        return None

    @abstractmethod
    @collective
    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        """Overwrite every member's buffer with that of `root_rank`, of equal type and size."""

    @abstractmethod
    @collective
    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        """Concatenate the buffers of all members, of `counts` elements, in rank order."""

    @collective
    def _allgather_by_broadcasts(
        self, send: Buffer, receive: Buffer, counts: Sequence[int]
    ) -> None:
        start = 0
        for root_rank, count in enumerate(counts):
            part = receive.slice(start, count)
            if root_rank == self.rank:
                part.copy_from(send)
            self.broadcast(part, root_rank)
            start += count

    @collective
    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes of every member, by rank, with one `allgather` for few of them."""
        room = _BLOCK_BYTES - _SIZE.size
        block = (_SIZE.pack(len(own)) + own[:room]).ljust(_BLOCK_BYTES, b"\0")
        blocks = self._gather_counted(block, [_BLOCK_BYTES] * self.size)
        sizes = [_SIZE.unpack_from(theirs)[0] for theirs in blocks]
        firsts = [b[_SIZE.size : _SIZE.size + n] for b, n in zip(blocks, sizes, strict=True)]
        if max(sizes) <= room:
            return firsts
        rests = self._gather_counted(own[room:], [max(size - room, 0) for size in sizes])
        return [first + rest for first, rest in zip(firsts, rests, strict=True)]

    @collective
    def _gather_counted(self, own: bytes, counts: list[int]) -> list[bytes]:
        texts = np.empty(sum(counts), np.uint8)
        send = np.array(bytearray(own), np.uint8)  # which may be empty
        self.allgather(Buffer.from_array(send), Buffer.from_array(texts), counts)
        whole, ends = texts.tobytes(), list(accumulate(counts))
        return [whole[end - count : end] for end, count in zip(ends, counts, strict=True)]

    @collective
    def gather_objects(self, own: object, wanted: bool = True) -> list[Any]:
        """Return the object of every member, which is pickled, by rank; [] if it is not wanted."""
        texts = self.gather_bytes(pickle.dumps(own))
        return [pickle.loads(text) for text in texts] if wanted else []

    @abstractmethod
    @collective
    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        """Send part r to rank r, and receive in rank order; counts are elements for each rank."""

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
        """Reduce `send`, unchanged, and store part r, counts[r] elements, in rank r's `receive`.

        By default all is reduced, and one part kept.
        """
        whole = send.like(send.count)
        self.allreduce_from(send, whole, op, prescale, postscale)
        receive.copy_from(whole.slice(sum(counts[: self.rank]), receive.count))

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
        """Return messages between members, or raise UnsupportedError if the engine has none."""
        raise UnsupportedError(
            f"[rank {self.rank}/{self.size}] the engine has no messages between pairs of ranks"
        )

    @collective
    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        """Allocate [nbytes] uint8, not initialized, that this communicator reduces fastest.

        `nbytes` and the offsets of buffers to be reduced are equal on all members. It is a numpy
        array or a torch tensor; the latter on a device, of a type in `capabilities.devices`.
        """
        self._require(device)
        if device == "cpu":
            return np.empty(nbytes, np.uint8)
        import torch  # memory on a device is always torch's

        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def slices(self) -> Slices | None:
        """Return the slices of memory that ranks of a node share; None on all members (local)."""
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
        """Copy host memory into a buffer that is reduced next (local)."""
        ctypes.memmove(buffer.pointer, source.pointer, source.nbytes)

    @collective  # noqa: B027 - most engines cannot survive a lost rank
    def confirm(self) -> None:
        """Raise RanksLostError unless all members have got this far, with right results.

        Where others can continue without a rank that ends, calls in which it ends may succeed with
        wrong results.
        """

    def explained(self, error: BaseException) -> BaseException:
        """Return a RanksLostError if ranks ended and others can go on; else the error (local)."""
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
        """Return whether it waits for `reopen`; raise PeerFailureError if it has ended (local)."""


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
        """Raise RanksLostError if a rank has ended, or one has called `revoke` (local)."""

    @abstractmethod
    def revoke(self) -> None:
        """Have all calls of all ranks on the communicators of this world fail (local).

        They raise an error for which `Communicator.explained` returns a RanksLostError.
        """

    @abstractmethod
    @collective
    def agree(self, value: bool) -> bool:
        """Return whether a value is true on all ranks, none of which has ended.

        The result is the same on all that are left, also after `revoke`. Before that, results of
        other calls may differ between them.
        """

    @abstractmethod
    def start_rank(self, host: str, known: bool) -> Newcomer:
        """Start a process that is to become a rank, on a host or on any ("") (local).

        It takes tenths of a second; forever, if the process ends at once. `known` says whether the
        launcher was given this host.
        """

    @abstractmethod
    @collective
    def reopen(self, newcomer: Newcomer | None = None) -> EngineWorld:
        """Return a world of the ranks that are left, in the same order.

        On the first rank, `newcomer` becomes the last rank, unless it ends. Ranks may end
        meanwhile. If a rank has reached a limit of the system, all raise SystemLimitError.
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
    def copies(self, memory: Elements) -> list[np.typing.NDArray[np.uint8]] | None:
        """Return each rank's copy, [nbytes] uint8, of `empty`; None on all if it is not shared."""

    @abstractmethod
    @collective
    def reduce(self, buffer: Buffer, prescale: float, postscale: float) -> None:
        """Overwrite this rank's slice with that of an allreduce; the rest is undefined."""

    @abstractmethod
    def add_placed(
        self,
        rows: np.typing.NDArray[np.uint64],
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


class Pending:
    """An operation in progress.

    Args:
        poll: makes progress without blocking, and returns whether the operation is complete.
        end: is called once after that.
    """

    def __init__(self, poll: Callable[[], bool], end: Callable[[], None] = lambda: None) -> None:
        self._poll, self._end = poll, end
        self._done = False

    def test(self) -> bool:
        """Make progress without blocking; return whether the operation is complete."""
        if not self._done and self._poll():
            self._end()
            self._done = True
        return self._done

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
