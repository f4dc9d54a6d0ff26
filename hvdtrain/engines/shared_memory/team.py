"""The ranks of a communicator that share memory, and what they do in it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Pending
from hvdtrain.engines.shared_memory.kernel import OPS, TYPES, Task, Team
from hvdtrain.engines.shared_memory.memory import NodeArena, NodeMemory, share_memory, warn_once
from hvdtrain.engines.shared_memory.processes import PeerWatch
from hvdtrain.engines.shared_memory.system_errors import Objection, objection_to, settle
from hvdtrain.errors import PeerFailureError
from hvdtrain.types import ReduceOp

__all__ = ["NodeTeam", "open_team"]

# A rank stages so much in one turn: small enough for the caches, large enough to pay for meeting.
_CHUNK_BYTES = 256 << 10
_PAGE_BYTES = 4096

# How long to look at a flag before sleeping on it: longer than it takes to wake a sleeper. With
# fewer cores than ranks that would only keep peers from their work.
_SPIN_NANOSECONDS = 100_000

# After so long in the kernel come signals, and the question whether all peers are alive.
_TIMEOUT_NANOSECONDS = 1_000_000_000

# How often to look up from shared memory, where nothing tells of the world outside.
_CHECK_SECONDS = 1.0

_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(TYPES)}
_OP_NUMBERS = {op: number for number, op in enumerate(OPS)}


def open_team(
    kernel: ctypes.CDLL,
    rank: int,
    allgather: Callable[[Any], list[Any]],
    check_launcher: Callable[[], object] = bool,
) -> NodeTeam | None:
    """Have the ranks of one node share memory (collective).

    Args:
        kernel: of load_kernel().
        rank: of this process among them.
        allgather: gathers one picklable value of every one of them, by rank.
        check_launcher: called every second or so of use: has whoever started the ranks ended?

    Returns:
        The team, or None on every rank where memory cannot be shared; then one of them has said
        why.

    Raises:
        SystemLimitError: a rank has no descriptors left for it (on every rank).
    """
    told = allgather((os.getpid(), os.sched_getaffinity(0)))
    watch, objection = _watch(
        {process: number for number, (process, _) in enumerate(told) if number != rank}
    )
    memory = None
    try:
        if reason := settle(allgather(objection)):
            if rank == 0:
                warn_once(reason)
        else:
            nbytes = _PAGE_BYTES + kernel.hvd_staging_bytes(_CHUNK_BYTES)
            memory = share_memory(nbytes, rank, len(told), allgather)
    finally:
        if memory is None and watch is not None:
            watch.close()
    if memory is None or watch is None:
        return None
    cores = set[int]().union(*(cores for _, cores in told))
    spin = _SPIN_NANOSECONDS if len(told) <= len(cores) else 0
    return NodeTeam(kernel, rank, memory, watch, allgather, check_launcher, spin)


def _watch(peers: dict[int, int]) -> tuple[PeerWatch | None, Objection]:
    try:
        return PeerWatch(peers), Objection()
    except (AttributeError, OSError) as error:
        return None, objection_to(error, "pidfd_open")


class NodeTeam:
    """Collective operations in shared memory; each rank calls the same ones in the same order.

    Attributes:
        arena: memory that is reduced without a copy.

    Args:
        kernel: the compiled part.
        rank: of this process.
        memory: a slot and a staging area for each rank.
        watch: on the processes of the peers.
        allgather: gathers one picklable value of every rank.
        check_launcher: called every second or so of use.
        spin_nanoseconds: how long to look at a flag before sleeping.
    """

    def __init__(
        self,
        kernel: ctypes.CDLL,
        rank: int,
        memory: NodeMemory,
        watch: PeerWatch,
        allgather: Callable[[Any], list[Any]],
        check_launcher: Callable[[], object],
        spin_nanoseconds: int = 0,
    ) -> None:
        self._check_launcher, self._checked = check_launcher, time.monotonic()
        size = len(memory.parts)
        self._kernel, self._memory = kernel, memory
        self.arena = NodeArena(rank, size, allgather)
        self._watch = watch
        self._slots = _addresses(memory.addresses)
        self._staging = _addresses([address + _PAGE_BYTES for address in memory.addresses])
        self._team = Team(
            slots=self._slots,
            rank=rank,
            size=size,
            spin_nanoseconds=spin_nanoseconds,
            staging=self._staging,
            chunk_bytes=_CHUNK_BYTES,
        )
        self._task = Task(team=ctypes.pointer(self._team))
        self._rank, self._size = rank, size

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        """Start an element-wise maximum of at most 8 numbers, in place."""
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self.check_peers()
        numbers = (ctypes.c_uint64 * values.size).from_buffer(values.data)
        self._kernel.hvd_start_max(self._team, numbers, values.size)
        return _Maximum(self, numbers)

    def finish_max(self, numbers: ctypes.Array[ctypes.c_uint64], nanoseconds: int) -> bool:
        """Wait for it that long; return whether it is complete."""
        done = self._kernel.hvd_finish_max(self._team, numbers, len(numbers), nanoseconds)
        return bool(done)

    def allreduce(
        self, source: Buffer, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """Reduce `source` into `buffer`; factors other than 1 are for fractional types."""
        self._prepare(buffer, op, prescale, postscale)
        if source is not buffer:
            self._task.source, self._task.location = source.pointer, 0
        self._finish(self._kernel.hvd_reduce)

    def add(self, buffer: Buffer, op: ReduceOp, prescale: float, owners: int) -> Buffer:
        """Return this rank's slice of `buffer`, in which the node is added up.

        Args:
            buffer: in shared memory, at one place on all ranks.
            op: the reduction.
            prescale: factor before it.
            owners: how many ranks get a slice.
        """
        self._prepare(buffer, op, prescale, 1.0, owners)
        self._finish(self._kernel.hvd_add)
        start, end = (self._kernel.hvd_slice_start(self._task, self._rank + k) for k in (0, 1))
        return buffer.slice(start, end - start)

    def spread(self, buffer: Buffer, postscale: float, owners: int) -> None:
        """Have all ranks hold postscale times every owner's slice of `buffer`."""
        self._prepare(buffer, ReduceOp.SUM, 1.0, postscale, owners)
        self._finish(self._kernel.hvd_spread)

    def _prepare(
        self, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float, owners: int = 0
    ) -> None:
        task = self._task
        task.source = task.data = buffer.pointer
        task.count = buffer.count
        task.type, task.op = _TYPE_NUMBERS[buffer.dtype], _OP_NUMBERS[op]
        task.prescale, task.postscale = prescale, postscale
        task.owners = owners or self._size
        task.stage = task.chunk = 0
        task.location = location = self.arena.location(buffer)
        if location:
            self._copies = _addresses(self.arena.addresses(location))
            task.copies = self._copies

    def _finish(self, call: Callable[[Task, int], int]) -> None:
        while not call(self._task, _TIMEOUT_NANOSECONDS):
            self.check_peers()

    def check_peers(self) -> None:
        """Raise PeerFailureError if the process of a rank has ended (local)."""
        self._checked = time.monotonic()
        self._check_launcher()
        if (number := self._watch.ended()) is not None:
            raise PeerFailureError(
                f"a peer on this node (number {number} of {self._size}) has ended while others "
                "waited for it: look for its own message"
            )

    def close(self) -> None:
        """Give up what the team holds; memory lives on where arrays show it (local)."""
        self._watch.close()
        self.arena.close()


class _Maximum(Pending):
    def __init__(self, team: NodeTeam, numbers: ctypes.Array[ctypes.c_uint64]) -> None:
        self._team, self._numbers = team, numbers

    def test(self) -> bool:
        return self._team.finish_max(self._numbers, 0)

    def wait(self) -> None:
        while not self._team.finish_max(self._numbers, _TIMEOUT_NANOSECONDS):
            self._team.check_peers()


def _addresses(values: list[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)
