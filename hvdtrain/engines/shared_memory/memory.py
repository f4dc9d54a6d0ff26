"""Memory that the ranks of a node share: which ranks can, what they map, and errors about it.

Neither host names nor MPI's information say which ranks are on a node: schedulers start two daemons
on one machine, containers on one host may be isolated from each other, and launchers choose host
names freely. So the ranks of a node are those that can read each other's memory.

The memory is memfds, which are freed with the last process. If a rank cannot share it, ranks fall
back to MPI. If a rank has reached a limit of the system, they do not: it would fail later, in the
middle of an operation, so all ranks raise an error that names the limit.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.control_groups import find_memory, read_file
from hvdtrain.engines.communicator import Gather
from hvdtrain.errors import SystemLimitError

_FILES = 4096


class SystemFailure(NamedTuple):
    """Why a rank failed to set up shared memory; empty if it did not."""

    reason: str = ""
    limit: str = ""


def failure_from_error(error: Exception, action: str) -> SystemFailure:
    """Return the failure that an error of this rank means."""
    if not isinstance(error, OSError):
        return SystemFailure(f"{action}: {error}")
    reason = f"{action}: {error.strerror or error}"
    return SystemFailure(reason, _limit(error, reason))


def agree_on_failure(failures: Iterable[Sequence[str]]) -> str:
    """Return the first reason among the failures of all ranks, "" for none."""
    reasons = []
    for reason, limit in failures:
        if limit:
            raise SystemLimitError(limit)
        reasons.append(reason)
    return next(filter(None, reasons), "")


def _limit(error: OSError, reason: str) -> str:
    host = socket.gethostname()
    process = f"process {os.getpid()} on {host}"
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = max(_FILES, 2 * soft)
        if 0 <= hard < wanted:
            how = f"have the hard limit of {hard} raised, and set ulimit -n {wanted}"
        else:
            how = f"set ulimit -n {wanted} where the ranks are started"
        return f"{process} has all {soft} files open that it may open ({reason}): {how}"
    if error.errno == errno.ENFILE:
        return (
            f"all files are open that may be open on {host} ({reason}): raise fs.file-max there, "
            "or end what holds them"
        )
    if error.errno == errno.ENOMEM:
        return (
            f"{process} gets no more memory from the system ({reason}): start fewer ranks there, "
            "or raise its limit: ulimit -v, the control group's, vm.max_map_count"
        )
    return ""


_logger = logging.getLogger("hvdtrain")

_NAME = "hvdtrain-memory"

_INVISIBLE = SystemFailure("its memory cannot be mapped by others")

# A location combines the number of the memory and the offset in it.
_OFFSET_BITS = 48

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_POPULATE_WRITE = 23


class NodeMemory:
    """Memory of equal size of each rank of the node, mapped here while an array refers to it."""

    def __init__(self, parts: list[np.typing.NDArray[np.uint8]]) -> None:
        self.parts = parts
        self.addresses = [part.ctypes.data for part in parts]


class NodeArena:
    """Allocates memory in which the ranks of a node can access one another's data."""

    def __init__(self, rank: int, size: int, allgather: Gather) -> None:
        self._rank, self._size, self._allgather = rank, size, allgather
        self._shared: list[NodeMemory] = []

    @collective
    def empty(self, nbytes: int) -> np.typing.NDArray[np.uint8] | None:
        """Allocate memory that is reduced without a copy; None on all ranks if one has none."""
        memory = share_memory(max(1, nbytes), self._rank, self._size, self._allgather)
        if memory is None:
            return None
        self._shared.append(memory)
        return memory.parts[self._rank][:nbytes]

    def forget_last(self) -> None:
        """Release the memory that empty() returned last, because another node has none."""
        self._shared.pop()

    def close(self) -> None:
        """Release all memory; that of all ranks stays mapped while an array refers to a part."""
        self._shared = []

    def location(self, buffer: Buffer) -> int:
        """Return the location of a buffer, equal where ranks access each other's; 0 if none."""
        return self.location_of(buffer.pointer)

    def location_of(self, address: int) -> int:
        for number, memory in enumerate(self._shared, start=1):
            offset = address - memory.addresses[self._rank]
            if 0 <= offset < memory.parts[self._rank].size:
                return number << _OFFSET_BITS | offset
        return 0

    def addresses(self, location: int) -> list[int]:
        """Return the address of each rank's data at a location, as mapped here."""
        memory = self._shared[(location >> _OFFSET_BITS) - 1]
        offset = location & (1 << _OFFSET_BITS) - 1
        return [address + offset for address in memory.addresses]

    def copies(self, buffer: Buffer) -> list[np.typing.NDArray[np.uint8]] | None:
        """Return the bytes of every rank's buffer; None for private memory."""
        location = self.location(buffer)
        if not location:
            return None
        memory = self._shared[(location >> _OFFSET_BITS) - 1]
        offset = location & (1 << _OFFSET_BITS) - 1
        return [part[offset : offset + buffer.nbytes] for part in memory.parts]


@collective
def share_memory(
    nbytes: int,
    rank: int,
    size: int,
    allgather: Gather,
    meet: Callable[[Sequence[int], Sequence[int]], SystemFailure] = lambda *_: SystemFailure(),
) -> NodeMemory | None:
    """Allocate `nbytes` of zeros on every rank of a node, writable by all of them.

    All pages are reserved before any is written: a page missing later would kill the process with
    SIGBUS. If memory cannot be allocated, the first rank warns once. `meet` is told the process of
    each rank, and its cores as the bits of a number, and may refuse: that saves messages.
    """

    def told(failure: SystemFailure) -> SystemFailure:
        text = f"each of {size} ranks cannot share {nbytes >> 10:,} KiB ({failure.reason})"
        return failure._replace(reason=failure.reason and text)

    # In one file, which each rank opens and maps once, however many there are.
    descriptor, failure = _create_file(_NAME) if rank == 0 else (None, SystemFailure())
    try:
        # All ranks check before any allocates: the out-of-memory killer might end a process.
        failure = told(failure if any(failure) else _check_free_memory(nbytes * size))
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        every = allgather((os.getpid(), cores, descriptor, failure))
        reason, parts = agree_on_failure(failure for *_, failure in every), None
        if not reason:
            refused = meet([process for process, *_ in every], [cores for _, cores, *_ in every])
            path = f"/proc/{every[0][0]}/fd/{every[0][2]}"
            parts, failure = _map_parts(path, nbytes, rank, size)
            failure = refused if any(refused) else told(failure)
            reason = agree_on_failure(allgather(failure))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if reason and rank == 0:
        warn_once(reason)
    return None if reason or parts is None else NodeMemory(parts)


@cache
def warn_once(reason: str) -> None:
    """Log once per process why the ranks of this node do not share memory."""
    _logger.warning(
        "hvdtrain: the ranks of this node communicate through MPI, which is slower: %s", reason
    )


def _check_free_memory(nbytes: int) -> SystemFailure:
    try:
        enough = nbytes <= find_memory().free_bytes
    except OSError as error:
        return failure_from_error(error, "reading /proc/meminfo")
    # The amount is left out because it changes, and equal messages are logged once.
    return SystemFailure(
        "" if enough else "the machine or the control group has too little memory left"
    )


def _create_file(name: str) -> tuple[int | None, SystemFailure]:
    """Return a descriptor of a new memfd, or why there is none."""
    try:
        return os.memfd_create(name), SystemFailure()
    except (AttributeError, OSError) as error:
        return None, failure_from_error(error, "memfd_create")


def _map_parts(
    path: str, nbytes: int, rank: int, size: int
) -> tuple[list[np.typing.NDArray[np.uint8]] | None, SystemFailure]:
    """Reserve this rank's part of a file, and map all; pages of others are faulted in when used."""
    step = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None, _INVISIBLE
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, _INVISIBLE
    except OSError as error:
        return None, failure_from_error(error, "opening a peer's memory")
    try:
        os.posix_fallocate(descriptor, rank * step, step)
    except OSError as error:
        os.close(descriptor)
        # Too little memory for this is no reason to end the job.
        return None, SystemFailure(f"posix_fallocate: {error.strerror}")
    try:
        # Python's mmap keeps a descriptor per mapping, of which many ranks would run out.
        address = _map(None, size * step, 0, descriptor, 0)
        memory = (ctypes.c_uint8 * (size * step)).from_address(address)
        weakref.finalize(memory, _LIBC.munmap, address, size * step).atexit = False
        _map(address + rank * step, step, _MAP_FIXED | mmap.MAP_POPULATE, descriptor, rank * step)
    except OSError as error:
        return None, failure_from_error(error, "mapping memory of the node")
    finally:
        os.close(descriptor)
    whole = np.frombuffer(memoryview(memory), np.uint8)
    return [whole[step * part :][:nbytes] for part in range(size)], SystemFailure()


def _map(at: int | None, nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    """Map a part of a file; return its address."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(at, nbytes, access, mmap.MAP_SHARED | flags, descriptor, offset)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)


def map_pages(addresses: Iterable[int]) -> None:
    """Map pages of others one by one; when one is first read, Linux maps the 16 around it."""
    for address in addresses:
        _LIBC.madvise(address, mmap.PAGESIZE, _POPULATE_WRITE)  # Linux before 5.14 has none


_NONCE_NAME = "hvdtrain-node"
_NONCE_BYTES = 16  # written as 32 hexadecimal digits


def detect_nodes(allgather: Gather) -> tuple[int, ...] | str:
    """Number the nodes: two ranks get the same number if they can read each other's memory.

    Each rank writes a random nonce into a memfd and announces its location. A rank belongs to the
    node of the lowest rank whose nonce it can read through /proc.
    """
    nonce = os.urandom(_NONCE_BYTES).hex()
    descriptor, failure = _create_file(_NONCE_NAME)
    try:
        if descriptor is not None:
            os.write(descriptor, nonce.encode())
        announced = allgather((os.getpid(), descriptor, nonce, failure))
        if reason := agree_on_failure(failure for *_, failure in announced):
            return reason
        node, failure = _first_readable([source for *source, _ in announced], nonce)
        results = allgather((node, failure))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    agree_on_failure(failure for _, failure in results)
    return tuple(node for node, _ in results)


def machine_identity() -> tuple[str, str]:
    """Return the boot ID and the host name of this machine."""
    return read_file(Path("/proc/sys/kernel/random/boot_id")) or "", socket.gethostname()


def unreadable_peers(nodes: Sequence[int], machines: Sequence[tuple[str, str]]) -> str:
    """Describe two ranks of one machine that cannot read each other's memory; "" for none.

    Containers with their own host names are considered nodes, as intended by their user.
    """
    for rank, (node, where) in enumerate(zip(nodes, machines, strict=True)):
        first = machines.index(where)
        if where[0] and node != nodes[first]:
            return (
                f"rank {first} and rank {rank}, both on {where[1]}, cannot read each other's files "
                "in /proc: have one user start them, in one container, and without hidepid"
            )
    return ""


def _first_readable(
    announced: Sequence[tuple[int, int, str]], own: str
) -> tuple[int, SystemFailure]:
    """Return the lowest rank whose nonce can be read, and the limit that prevented reading it."""
    for rank, (process, descriptor, nonce) in enumerate(announced):
        try:
            if nonce == own or _reads(process, descriptor, nonce):
                return rank, SystemFailure()
        except OSError as error:
            failure = failure_from_error(error, "reading a peer's memory")
            # Any other error means another node, or a process isolated like one.
            if failure.limit:
                return rank, failure
    raise AssertionError("a rank finds its own nonce")


def _reads(process: int, descriptor: int, nonce: str) -> bool:
    path = f"/proc/{process}/fd/{descriptor}"
    # In another PID namespace this is another process's file; opening a pipe would block.
    if not os.readlink(path).startswith(f"/memfd:{_NONCE_NAME}"):
        return False
    with open(path, "rb") as memory:
        return memory.read(2 * _NONCE_BYTES) == nonce.encode()
