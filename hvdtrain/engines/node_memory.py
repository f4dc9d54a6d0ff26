"""Memory that all ranks of a node map: nameless files, which vanish with the last process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NodeMemory", "share_memory"]

_NAME = "hvdtrain-memory"


class NodeMemory:
    """One piece of memory of every rank of the node, all of one size, as mapped by this process.

    Attributes:
        parts: for each rank its bytes; a part lives as long as some array shows it.
    """

    def __init__(self, parts: list[npt.NDArray[np.uint8]]) -> None:
        self.parts = parts
        self.addresses = [part.ctypes.data for part in parts]


def share_memory(nbytes: int, allgather: Callable[[Any], list[Any]]) -> NodeMemory | None:
    """Have every rank of a node give `nbytes` of zeros that all of them can write (collective).

    All of it is reserved before anybody writes: a page that is missing later would end the
    process with SIGBUS.

    Args:
        nbytes: equal on all ranks.
        allgather: gathers one picklable value of every rank of the node, by rank.

    Returns:
        The memory, or None on every rank if one cannot give or see it.
    """
    descriptor = _reserve(nbytes)
    try:
        announced = allgather((os.getpid(), descriptor))
        parts = _map_all(announced, nbytes)
        complete = all(allgather(parts is not None))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return NodeMemory(parts) if complete and parts is not None else None


def _reserve(nbytes: int) -> int | None:
    try:
        # The kernel would look for more than there is until it ends some process.
        if nbytes > _available_bytes():
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
    announced: list[tuple[int, int | None]], nbytes: int
) -> list[npt.NDArray[np.uint8]] | None:
    try:
        return [_map(f"/proc/{process}/fd/{number}", nbytes) for process, number in announced]
    except OSError:
        return None


def _map(path: str, nbytes: int) -> npt.NDArray[np.uint8]:
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(descriptor, nbytes, flags), np.uint8)
    finally:
        os.close(descriptor)
