"""Memory that all ranks of a node map: nameless files, which vanish with the last process."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.shared_memory.system_errors import Objection, objection_to, settle
from hvdtrain.memory import find_memory

__all__ = ["NodeArena", "NodeMemory", "share_memory", "warn_once"]

_logger = logging.getLogger("hvdtrain")

_NAME = "hvdtrain-memory"

_UNSEEN = Objection("its memory cannot be mapped by others")

# A place in shared memory is told by the number of the memory and the offset in it.
_OFFSET_BITS = 48

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class NodeMemory:
    """One piece of memory of every rank of the node, all of one size, as mapped by this process.

    Attributes:
        parts: for each rank its bytes; a part lives as long as some array shows it.
    """

    def __init__(self, parts: list[npt.NDArray[np.uint8]]) -> None:
        self.parts = parts
        self.addresses = [part.ctypes.data for part in parts]


class NodeArena:
    """Memory in which ranks of a node reach one another's data.

    Args:
        rank: of this process on the node.
        size: how many ranks the node has.
        allgather: gathers one picklable value of every rank of the node, by rank.
    """

    def __init__(self, rank: int, size: int, allgather: Callable[[Any], list[Any]]) -> None:
        self._rank, self._size, self._allgather = rank, size, allgather
        self._shared: list[NodeMemory] = []

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return memory that is reduced without a copy (collective); None if there is none."""
        memory = share_memory(max(1, nbytes), self._rank, self._size, self._allgather)
        if memory is None:
            return None
        self._shared.append(memory)
        return memory.parts[self._rank][:nbytes]

    def forget_last(self) -> None:
        """Give up the memory that empty() returned last, which another node could not match."""
        self._shared.pop()

    def close(self) -> None:
        """Give up all of it; it lives on where arrays show it (local)."""
        self._shared = []

    def location(self, buffer: Buffer) -> int:
        """Return a number that is equal on ranks that reach one another's; 0 for private memory."""
        for number, memory in enumerate(self._shared, start=1):
            offset = buffer.pointer - memory.addresses[self._rank]
            if 0 <= offset < memory.parts[self._rank].size:
                return number << _OFFSET_BITS | offset
        return 0

    def addresses(self, location: int) -> list[int]:
        """Return where this process sees each rank's data at such a location."""
        memory = self._shared[(location >> _OFFSET_BITS) - 1]
        offset = location & (1 << _OFFSET_BITS) - 1
        return [address + offset for address in memory.addresses]


def share_memory(
    nbytes: int, rank: int, size: int, allgather: Callable[[Any], list[Any]]
) -> NodeMemory | None:
    """Have every rank of a node give `nbytes` of zeros that all of them can write (collective).

    All of it is reserved before anybody writes: a page that is missing later would end the
    process with SIGBUS. Where it cannot be had, the first rank warns once.

    Args:
        nbytes: equal on all ranks.
        rank: of this process on the node.
        size: how many ranks the node has.
        allgather: gathers one picklable value of every rank of the node, by rank.

    Returns:
        The memory, or None on every rank if one cannot give or see it.

    Raises:
        SystemLimitError: a rank has no descriptor left for it (on every rank).
    """
    # All look before anybody takes: the kernel would look for more than there is until it ends
    # some process.
    reason = settle(allgather(_objection(nbytes * size)))
    parts = None
    if not reason:
        parts, reason = _share(nbytes, rank, allgather)
    if reason and rank == 0:
        warn_once(f"each of {size} ranks cannot share {nbytes >> 10:,} KiB ({reason})")
    return None if reason or parts is None else NodeMemory(parts)


def _share(
    nbytes: int, rank: int, allgather: Callable[[Any], list[Any]]
) -> tuple[list[npt.NDArray[np.uint8]] | None, str]:
    """Give memory, and map everybody's; return it, or why a rank cannot."""
    descriptor, objection = _reserve(nbytes)
    try:
        announced = allgather((os.getpid(), descriptor, objection))
        reason = settle(said for *_, said in announced)
        if reason:
            return None, reason
        parts, objection = _map_all([place for *place, _ in announced], nbytes, rank)
        return parts, settle(allgather(objection))
    finally:
        if descriptor is not None:
            os.close(descriptor)


@cache
def warn_once(reason: str) -> None:
    """Say why ranks of this node do not share memory; communicators are opened again and again."""
    _logger.warning(
        "hvdtrain: the ranks of this node meet through MPI, which is slower: %s", reason
    )


def _objection(nbytes: int) -> Objection:
    try:
        enough = nbytes <= find_memory().free_bytes
    except OSError as error:
        return objection_to(error, "reading /proc/meminfo")
    # What is free changes all the time, and this is to be said once.
    return Objection(
        "" if enough else "the machine or the control group has too little memory left"
    )


def _reserve(nbytes: int) -> tuple[int | None, Objection]:
    """Make a nameless file of `nbytes`; return it, or why there is none."""
    try:
        descriptor = os.memfd_create(_NAME)
    except (AttributeError, OSError) as error:
        return None, objection_to(error, "memfd_create")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        # Too little memory for this is not too little for everything.
        return None, Objection(f"posix_fallocate: {error.strerror}")
    return descriptor, Objection()


def _map_all(
    announced: list[list[Any]], nbytes: int, own: int
) -> tuple[list[npt.NDArray[np.uint8]] | None, Objection]:
    try:
        parts = [
            _map(f"/proc/{process}/fd/{number}", nbytes, populate=rank == own)
            for rank, (process, number) in enumerate(announced)
        ]
    except FileNotFoundError:
        return None, _UNSEEN
    except OSError as error:
        return None, objection_to(error, "mapping a peer's memory")
    return parts, Objection()


def _map(path: str, nbytes: int, populate: bool) -> npt.NDArray[np.uint8]:
    """Map a peer's memory; the pages of others are looked up when they are used."""
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Python's own mmap keeps a descriptor for each, and many ranks would run out of them.
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _LIBC.mmap(None, nbytes, access, flags, descriptor, 0)
    finally:
        os.close(descriptor)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)
