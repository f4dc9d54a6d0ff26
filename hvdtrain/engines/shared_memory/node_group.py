"""Collective operations of the ranks of a node, in shared memory."""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from operator import or_

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import VOTE_DONE, Gather, Pending, VoteCalls
from hvdtrain.engines.shared_memory.kernel import OPS, TYPES, Task, Team, load_calls
from hvdtrain.engines.shared_memory.memory import (
    NodeArena,
    NodeMemory,
    SystemFailure,
    failure_from_error,
    map_pages,
    share_memory,
)
from hvdtrain.errors import ConnectionLostError
from hvdtrain.types import DType, ReduceOp


@dataclass
class _Watched:
    """A descriptor that becomes readable when a process ends, and its number of users."""

    descriptor: int
    users: int = 0


_lock = threading.Lock()
_watched: dict[int, _Watched] = {}


def _acquire(process: int) -> int:
    with _lock:
        if process not in _watched:
            _watched[process] = _Watched(os.pidfd_open(process))
        _watched[process].users += 1
        return _watched[process].descriptor


def _release(process: int) -> None:
    with _lock:
        watched = _watched[process]
        watched.users -= 1
        if watched.users == 0:
            os.close(watched.descriptor)
            del _watched[process]


# How often to handle signals, and to check peers.
CHECK_SECONDS = 1.0

# The next ranks of the node, whose ends a rank sees itself. It tells the others, in every group.
WATCHED = 8
_ended: set[int] = set()


class Peers:
    """The launcher, and the processes of the other ranks of a node, watched until it is closed.

    `processes` has their numbers, and begins with those that this rank watches for all.
    """

    def __init__(
        self,
        processes: Mapping[int, int],
        size: int,
        check_launcher: Callable[[], object],
        check_seconds: float,
    ) -> None:
        self._size, self._check_launcher = size, check_launcher
        self.check_nanoseconds = int(check_seconds * 1e9)
        self.due = ctypes.c_int64(time.monotonic_ns() + self.check_nanoseconds)
        self._numbers = dict(processes)
        self.told = ctypes.c_int64()  # a process that has ended; later in memory of the group
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        _ended.difference_update(processes)  # another one may have had its number
        try:
            for process in islice(processes, WATCHED):
                descriptor = _acquire(process)
                self._watched[descriptor] = process
                self._poll.register(descriptor, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def check_now_and_then(self) -> None:
        """Check as `check` does, unless that was done a moment ago."""
        if time.monotonic_ns() > self.due.value:
            self.check()

    def check(self) -> None:
        """Check that the launcher and the processes of all peers are running."""
        self.due.value = time.monotonic_ns() + self.check_nanoseconds
        self._check_launcher()
        if not self.told.value:
            _ended.update(self._watched[descriptor] for descriptor, _ in self._poll.poll(0))
            self.told.value = next(iter(_ended & self._numbers.keys()), 0)
        if ended := self.told.value:
            _ended.add(ended)
            raise ConnectionLostError(
                f"a peer on this node (number {self._numbers[ended]} of {self._size}) has ended "
                "while others waited for it: look for its own message"
            )

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        for descriptor, process in self._watched.items():
            self._poll.unregister(descriptor)
            _release(process)
        self._numbers, self._watched, self.told = {}, {}, ctypes.c_int64()


class NodeMaximum(Pending):
    """A maximum that all ranks start; see NodeGroup.start_max."""

    def __init__(
        self, kernel: ctypes.CDLL, team: Team, values: np.typing.NDArray[np.uint64], peers: Peers
    ) -> None:
        self._kernel, self._team, self._peers = kernel, team, peers
        self._numbers = (ctypes.c_uint64 * values.size).from_buffer(values.data)
        kernel.hvd_start_max(team, self._numbers, values.size)

    def test(self) -> bool:
        if self._finish(0):
            return True
        self._peers.check_now_and_then()
        return False

    def wait(self) -> None:
        while not self._finish(self._peers.check_nanoseconds):
            self._peers.check()

    def _finish(self, nanoseconds: int) -> bool:
        numbers = self._numbers
        return bool(self._kernel.hvd_finish_max(self._team, numbers, len(numbers), nanoseconds))


# Bytes that a rank stages at a time: small enough for the caches, large enough to amortize the
# synchronization.
CHUNK_BYTES = 256 << 10
# A page before them, for the slot of a rank and few bytes.
SLOT_BYTES = 4096

# Data of at most such a part of a chunk are added by every rank, as in private_data.h.
_SMALL_PARTS = 4

_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(TYPES)}
_OP_NUMBERS = {op: number for number, op in enumerate(OPS)}


class NodeGroup:
    """Collective operations in shared memory; all ranks call them in the same order."""

    def __init__(
        self,
        kernel: ctypes.CDLL,
        rank: int,
        memory: NodeMemory,
        peers: Peers,
        allgather: Gather,
        spin_nanoseconds: int = 0,
    ) -> None:
        size = len(memory.parts)
        self._kernel, self._memory, self.peers = kernel, memory, peers
        peers.told = ctypes.c_int64.from_address(memory.addresses[0] + SLOT_BYTES - 8)
        self.arena = NodeArena(rank, size, allgather)
        self._slots = _addresses(memory.addresses)
        self._staging = _addresses([address + SLOT_BYTES for address in memory.addresses])
        map_pages(memory.addresses)  # of slots
        self._state = Team(
            slots=self._slots,
            rank=rank,
            size=size,
            spin_nanoseconds=spin_nanoseconds,
            staging=self._staging,
            chunk_bytes=CHUNK_BYTES,
            due=ctypes.pointer(peers.due),
        )
        self._task = Task(team=ctypes.pointer(self._state))
        self._rank, self._size = rank, size

    @collective
    def start_max(self, values: np.typing.NDArray[np.uint64]) -> Pending:
        self.peers.check_now_and_then()
        return NodeMaximum(self._kernel, self._state, values, self.peers)

    @collective
    def allreduce(
        self, source: Buffer, buffer: Buffer, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """Reduce `source` into `buffer`."""
        self._prepare(buffer, op, prescale, postscale)
        if source is not buffer:
            self._task.source, self._task.location = source.pointer, 0
        self._finish(self._kernel.hvd_reduce)

    @collective
    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        """Gather pieces of at most CHUNK_BYTES."""
        itemsize = send.dtype.itemsize
        sizes = (ctypes.c_int64 * self._size)(*(count * itemsize for count in counts))
        self._task.source, self._task.data, self._task.stage = send.pointer, receive.pointer, 0
        self._finish(lambda task, timeout: self._kernel.hvd_gather(task, sizes, timeout))

    @collective
    def vote_on_many(
        self,
        votes: bytes,
        pieces: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> bytes:
        self.peers.check_now_and_then()
        numbers = array("q", pieces)  # which the task refers to until it is done
        task = self._task
        task.pieces, _ = numbers.buffer_info()
        task.count = sum(numbers[2::3])
        task.location = 0
        self._describe(dtype, op, prescale, postscale)
        task.ballot = type(task.ballot).from_buffer_copy(votes)
        done = self._finish(self._kernel.hvd_vote) == VOTE_DONE
        return b"" if done else bytes(task.ballot)

    @collective
    def add(
        self, buffer: Buffer, op: ReduceOp, prescale: float, owners: int, postscale: float = 1.0
    ) -> Buffer:
        """Reduce within the node and return this rank's slice of the result."""
        self._prepare(buffer, op, prescale, postscale, owners)
        self._finish(self._kernel.hvd_add)
        start, end = (self._kernel.hvd_slice_start(self._task, self._rank + k) for k in (0, 1))
        return buffer.slice(start, end - start)

    @collective
    def spread(self, buffer: Buffer, postscale: float, owners: int) -> None:
        """Write postscale times each owner's slice into the buffers of all ranks."""
        self._prepare(buffer, ReduceOp.SUM, 1.0, postscale, owners)
        self._finish(self._kernel.hvd_spread)

    def add_placed(
        self,
        rows: np.typing.NDArray[np.uint64],
        dtype: DType,
        prescales: Sequence[float],
        postscale: float,
    ) -> None:
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

    @collective
    def meet(self) -> None:
        """Wait until all ranks are here, and see what they have written."""
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

    def _finish(self, call: Callable[[Task, int], int]) -> int:
        while not (result := call(self._task, self.peers.check_nanoseconds)):
            self.peers.check()
        return result

    def task(self, dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> Task:
        """Return a task of its own, of one tensor."""
        return Task(
            team=ctypes.pointer(self._state),
            type=_TYPE_NUMBERS[dtype],
            op=_OP_NUMBERS[op],
            prescale=prescale,
            postscale=postscale,
            owners=self._size,
        )

    def close(self) -> None:
        """Release the memory, which stays mapped while arrays refer to it."""
        self.peers.close()
        self.arena.close()


class NodeVotedReduction:
    """An allreduce in the slots and staging areas of a node group."""

    def __init__(
        self, group: NodeGroup, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        self._group, self._calls = group, load_calls()
        self._terms = dtype, op, prescale, postscale
        self._task = group.task(*self._terms)
        self._address, self._count = ctypes.addressof(self._task), 0
        self._least_shared = CHUNK_BYTES // _SMALL_PARTS // dtype.itemsize + 1

    @collective
    def __call__(self, votes: bytes, pieces: Sequence[int]) -> bytes:
        if len(pieces) > 3 or self._calls is None:
            return self._group.vote_on_many(votes, pieces, *self._terms)
        source, target, count = pieces
        if count != self._count or count >= self._least_shared:
            self._task.count = self._count = count
            self._locate(source, target)
        self._calls.cast(self._address, votes[:16], 0, source)
        return self.finish(self._calls.look(self._address, target))

    def calls(self, count: int) -> VoteCalls | None:
        if self._calls is None or count >= self._least_shared:
            return None
        self._task.count = self._count = count
        return partial(self._calls.cast, self._address), partial(self._calls.look, self._address)

    @collective
    def finish(self, verdict: int) -> bytes:
        calls, peers = self._calls, self._group.peers
        while not verdict and calls is not None:
            peers.check_now_and_then()
            verdict = calls.resume(self._address, peers.check_nanoseconds)
        return b"" if verdict == VOTE_DONE else bytes(self._task.ballot)

    def _locate(self, source: int, target: int) -> None:
        arena, shared = self._group.arena, self._count >= self._least_shared
        location = arena.location_of(target) if shared and source == target else 0
        self._task.location = location
        if location:
            self._task.copies = _addresses(arena.addresses(location))


def _addresses(values: list[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


# How long to spin on a flag before sleeping: longer than it takes to wake up. With fewer cores than
# ranks, spinning would only keep peers from running.
_SPIN_NANOSECONDS = 100_000


@collective
def open_node_group(
    kernel: ctypes.CDLL,
    rank: int,
    size: int,
    allgather: Gather,
    check_launcher: Callable[[], object] = bool,
    check_seconds: float = CHECK_SECONDS,
) -> NodeGroup | None:
    """Set up shared memory among the ranks of one node."""
    peers, spin = None, 0

    def watch(processes: Sequence[int], cores: Sequence[int]) -> SystemFailure:
        nonlocal peers, spin
        size = len(processes)
        following = sorted(range(size), key=lambda number: number <= rank)
        others = {processes[number]: number for number in following if number != rank}
        spin = _SPIN_NANOSECONDS if size <= reduce(or_, cores).bit_count() else 0
        try:
            peers = Peers(others, size, check_launcher, check_seconds)
        except (AttributeError, OSError) as error:
            return failure_from_error(error, "pidfd_open")
        return SystemFailure()

    memory, nbytes = None, SLOT_BYTES + kernel.hvd_staging_bytes(CHUNK_BYTES)
    try:
        memory = share_memory(nbytes, rank, size, allgather, watch)
    finally:
        if memory is None and peers is not None:
            peers.close()
    if memory is None or peers is None:
        return None
    return NodeGroup(kernel, rank, memory, peers, allgather, spin)
