"""Memory that all ranks of a node map: nameless files, which vanish with the last process."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NodeMemory", "share_memory"]

_NAME = "hvdtrain-memory"

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


def share_memory(
    nbytes: int, rank: int, size: int, allgather: Callable[[Any], list[Any]]
) -> NodeMemory | None:
    """Have every rank of a node give `nbytes` of zeros that all of them can write (collective).

    All of it is reserved before anybody writes: a page that is missing later would end the
    process with SIGBUS.

    Args:
        nbytes: equal on all ranks.
        rank: of this process on the node.
        size: how many ranks the node has.
        allgather: gathers one picklable value of every rank of the node, by rank.

    Returns:
        The memory, or None on every rank if one cannot give or see it.
    """
    descriptor = _reserve(nbytes, size)
    try:
        announced = allgather((os.getpid(), descriptor))
        parts = _map_all(announced, nbytes, rank)
        complete = all(allgather(parts is not None))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return NodeMemory(parts) if complete and parts is not None else None


def _reserve(nbytes: int, size: int) -> int | None:
    try:
        # The kernel would look for more than there is until it ends some process.
        if nbytes * size > _available_bytes():
            return None
        descriptor = os.memfd_create(_NAME)
    except (AttributeError, OSError):
        return None
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _available_bytes() -> int:
    """Return how much memory the machine can still give."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


def _map_all(
    announced: list[tuple[int, int | None]], nbytes: int, own: int
) -> list[npt.NDArray[np.uint8]] | None:
    try:
        return [
            _map(f"/proc/{process}/fd/{number}", nbytes, populate=rank == own)
            for rank, (process, number) in enumerate(announced)
        ]
    except OSError:
        return None


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
        raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes")
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)
