"""Collective operations of the ranks of a node, in shared memory."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.allgather import Allgather
from hvdtrain.engines.communicator import Pending, Pieces
from hvdtrain.engines.shared_memory.kernel import OPS, TYPES, Task, Team, load_calls
from hvdtrain.engines.shared_memory.memory import NodeArena, NodeMemory, share_memory, warn_once
from hvdtrain.engines.shared_memory.processes import PeerWatch
from hvdtrain.engines.shared_memory.system_errors import (
    SystemFailure,
    agree_on_failure,
    failure_from_error,
)
from hvdtrain.engines.shared_memory.voted_reduction import NodeVotedReduction
from hvdtrain.errors import PeerFailureError
from hvdtrain.types import DType, ReduceOp

__all__ = ["NodeGroup", "open_node_group"]

# Bytes that a rank stages at a time: small enough for the caches, large enough to amortize the
# synchronization.
_CHUNK_BYTES = 256 << 10
_PAGE_BYTES = 4096

# Data of at most such a part of a chunk are added by every rank, as in private_data.h.
_SMALL_PARTS = 4

# How long to spin on a flag before sleeping: longer than it takes to wake up. With fewer cores than
# ranks, spinning would only keep peers from running.
_SPIN_NANOSECONDS = 100_000

# How often to handle signals, and to check that peers and the launcher are alive, which shared
# memory does not show.
_CHECK_SECONDS = 1.0

_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(TYPES)}
_OP_NUMBERS = {op: number for number, op in enumerate(OPS)}


def open_node_group(
    kernel: ctypes.CDLL,
    rank: int,
    allgather: Allgather,
    check_launcher: Callable[[], object] = bool,
    check_seconds: float = _CHECK_SECONDS,
) -> NodeGroup | None:
    """Set up shared memory among the ranks of one node (collective).

    Args:
        kernel: result of load_kernel().
        rank: rank of this process on the node.
        allgather: function that gathers one picklable value per rank of the node, in rank order.
        check_launcher: function called now and then during use, to detect that the launcher has
            ended.
        check_seconds: how often it is called, and peers are checked.

    Returns:
        The group, or None on every rank if memory cannot be shared; one of them then logs why.

    Raises:
        SystemLimitError: a rank has no file descriptors left (raised on every rank).
    """
    processes = allgather((os.getpid(), os.sched_getaffinity(0)))
    watch, failure = _watch(
        {process: number for number, (process, _) in enumerate(processes) if number != rank}
    )
    memory = None
    try:
        if reason := agree_on_failure(allgather(failure)):
            if rank == 0:
                warn_once(reason)
        else:
            nbytes = _PAGE_BYTES + kernel.hvd_staging_bytes(_CHUNK_BYTES)
            memory = share_memory(nbytes, rank, len(processes), allgather)
    finally:
        if memory is None and watch is not None:
            watch.close()
    if memory is None or watch is None:
        return None
    cores = set[int]().union(*(cores for _, cores in processes))
    spin = _SPIN_NANOSECONDS if len(processes) <= len(cores) else 0
    return NodeGroup(kernel, rank, memory, watch, allgather, check_launcher, spin, check_seconds)


def _watch(peers: dict[int, int]) -> tuple[PeerWatch | None, SystemFailure]:
    try:
        return PeerWatch(peers), SystemFailure()
    except (AttributeError, OSError) as error:
        return None, failure_from_error(error, "pidfd_open")


class NodeGroup:
    """Collective operations in shared memory; all ranks call them in the same order.

    Attributes:
        arena: allocator of memory that is reduced without a copy.

    Args:
        kernel: compiled kernel.
        rank: rank of this process on the node.
        memory: one slot and one staging area for each rank.
        watch: watch on the peers' processes.
        allgather: function that gathers one picklable value per rank, in rank order.
        check_launcher: function called now and then during use.
        spin_nanoseconds: time to spin on a flag before sleeping.
        check_seconds: how often to handle signals, call `check_launcher`, and check the peers.
    """

    def __init__(
        self,
        kernel: ctypes.CDLL,
        rank: int,
        memory: NodeMemory,
        watch: PeerWatch,
        allgather: Allgather,
        check_launcher: Callable[[], object],
        spin_nanoseconds: int = 0,
        check_seconds: float = _CHECK_SECONDS,
    ) -> None:
        self._check_launcher, self._checked = check_launcher, time.monotonic()
        self._check_seconds = check_seconds
        self._timeout_nanoseconds = int(check_seconds * 1e9)
        size = len(memory.parts)
        self._kernel, self._memory = kernel, memory
        self.arena = NodeArena(rank, size, allgather)
        self._watch = watch
        self._slots = _addresses(memory.addresses)
        self._staging = _addresses([address + _PAGE_BYTES for address in memory.addresses])
        self._state = Team(
            slots=self._slots,
            rank=rank,
            size=size,
            spin_nanoseconds=spin_nanoseconds,
            staging=self._staging,
            chunk_bytes=_CHUNK_BYTES,
        )
        self._task = Task(team=ctypes.pointer(self._state))
        self._rank, self._size = rank, size

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        """Start an element-wise maximum, in place (collective).

        Args:
            values: at most 8 numbers, uint64.
        """
        self._check_now_and_then()
        numbers = (ctypes.c_uint64 * values.size).from_buffer(values.data)
        self._kernel.hvd_start_max(self._state, numbers, values.size)
        return _Maximum(self, numbers)

    def finish_max(self, numbers: ctypes.Array[ctypes.c_uint64], wait: bool) -> bool:
        """Return whether a maximum is complete.

        Args:
            numbers: values passed to start_max().
            wait: whether to wait for it, until it is time to check the peers.
        """
        nanoseconds = self._timeout_nanoseconds if wait else 0
        done = self._kernel.hvd_finish_max(self._state, numbers, len(numbers), nanoseconds)
        return bool(done)

    def allreduce(
        self, source: Buffer, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """Reduce `source` into `buffer` (collective).

        Args:
            source: elements to reduce, in host memory; may be `buffer` itself.
            buffer: memory for the result, of the same type and size.
            op: SUM, MIN, MAX or PRODUCT.
            prescale: factor before the reduction; 1 for integers.
            postscale: factor after it; 1 for integers.
        """
        self._prepare(buffer, op, prescale, postscale)
        if source is not buffer:
            self._task.source, self._task.location = source.pointer, 0
        self._finish(self._kernel.hvd_reduce)

    def allreduce_many(
        self,
        pieces: Pieces,
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce many tensors (collective).

        Args:
            pieces: tensors, at least one.
            dtype: element type of all.
            op, prescale, postscale: as in `allreduce`.
        """
        task = self._task
        task.pieces, _ = pieces.buffer_info()
        task.count = sum(pieces[2::3])
        task.location = 0
        self._describe(dtype, op, prescale, postscale)
        self._finish(self._kernel.hvd_reduce)

    def add(
        self, buffer: Buffer, op: ReduceOp, prescale: float, owners: int, postscale: float = 1.0
    ) -> Buffer:
        """Reduce within the node and return this rank's slice of the result (collective).

        Args:
            buffer: elements in shared memory, at the same location on all ranks.
            op: SUM, MIN, MAX or PRODUCT.
            prescale: factor before the reduction.
            owners: number of ranks that own a slice.
            postscale: factor after the reduction.
        """
        self._prepare(buffer, op, prescale, postscale, owners)
        self._finish(self._kernel.hvd_add)
        start, end = (self._kernel.hvd_slice_start(self._task, self._rank + k) for k in (0, 1))
        return buffer.slice(start, end - start)

    def spread(self, buffer: Buffer, postscale: float, owners: int) -> None:
        """Write postscale times each owner's slice into the buffers of all ranks (collective).

        Args:
            buffer: elements in shared memory, at the same location on all ranks.
            postscale: factor after the reduction.
            owners: number of ranks that own a slice.
        """
        self._prepare(buffer, ReduceOp.SUM, 1.0, postscale, owners)
        self._finish(self._kernel.hvd_spread)

    def add_placed(
        self,
        rows: npt.NDArray[np.uint64],
        dtype: DType,
        prescales: Sequence[float],
        postscale: float,
    ) -> None:
        """Add pieces of memory that lie elsewhere on each rank (local).

        Args:
            rows: number of elements of each piece, and addresses of its sources and its targets,
                as mapped here, [pieces, 1 + sources + targets].
            dtype: element type.
            prescales: factor of each source.
            postscale: factor after the addition.
        """
        pieces, columns = rows.shape
        sources = len(prescales)
        self._kernel.hvd_add_placed(
            rows.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
            pieces,
            sources,
            columns - 1 - sources,
            _TYPE_NUMBERS[dtype],
            (ctypes.c_double * sources)(*prescales),
            postscale,
        )

    def meet(self) -> None:
        """Wait until all ranks are here, and see what they have written (collective)."""
        value = Buffer.from_array(np.zeros(1, np.uint8))
        self.allreduce(value, value, ReduceOp.MAX, 1.0, 1.0)

    def _prepare(
        self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float, owners: int = 0
    ) -> None:
        task = self._task
        task.source = task.data = buffer.pointer
        task.count, task.pieces = buffer.count, 0
        self._describe(buffer.dtype, op, prescale, postscale, owners)
        task.location = location = self.arena.location(buffer)
        if location:
            self._copies = _addresses(self.arena.addresses(location))
            task.copies = self._copies

    def _describe(
        self, dtype: DType, op: ReduceOp, prescale: float, postscale: float, owners: int = 0
    ) -> None:
        task = self._task
        task.type, task.op = _TYPE_NUMBERS[dtype], _OP_NUMBERS[op]
        task.prescale, task.postscale = prescale, postscale
        task.owners = owners or self._size
        task.stage = task.chunk = 0

    def _finish(self, call: Callable[[Task, int], int]) -> None:
        while not call(self._task, self._timeout_nanoseconds):
            self.check_peers()

    def voted_reduction(
        self, count: int, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> NodeVotedReduction | None:
        """Return a reduction that is voted on and run in one call (local).

        Args:
            count: number of elements.
            dtype: element type.
            op, prescale, postscale: as in `allreduce`.

        Returns:
            The reduction; None if there is no such call.
        """
        calls = load_calls()
        if calls is None:
            return None
        task = Task(
            team=ctypes.pointer(self._state),
            count=count,
            type=_TYPE_NUMBERS[dtype],
            op=_OP_NUMBERS[op],
            prescale=prescale,
            postscale=postscale,
            owners=self._size,
        )
        return NodeVotedReduction(
            calls,
            task,
            self.arena if count * dtype.itemsize > _CHUNK_BYTES // _SMALL_PARTS else None,
            self._check_now_and_then,
            self.check_peers,
            self._timeout_nanoseconds,
        )

    def _check_now_and_then(self) -> None:
        if time.monotonic() - self._checked > self._check_seconds:
            self.check_peers()

    def check_peers(self) -> None:
        """Check that the launcher and the processes of all peers are running (local).

        Raises:
            PeerFailureError: the process of a rank has ended.
        """
        self._checked = time.monotonic()
        self._check_launcher()
        if (number := self._watch.ended()) is not None:
            raise PeerFailureError(
                f"a peer on this node (number {number} of {self._size}) has ended while others "
                "waited for it: look for its own message"
            )

    def close(self) -> None:
        """Release the memory, which stays mapped while arrays refer to it (local)."""
        self._watch.close()
        self.arena.close()


class _Maximum(Pending):
    def __init__(self, group: NodeGroup, numbers: ctypes.Array[ctypes.c_uint64]) -> None:
        self._group, self._numbers = group, numbers

    def test(self) -> bool:
        return self._group.finish_max(self._numbers, wait=False)

    def wait(self) -> None:
        while not self._group.finish_max(self._numbers, wait=True):
            self._group.check_peers()


def _addresses(values: list[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)
