"""What this machine gives to ranks: cores, and memory that they can share."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hvdtrain.control_groups import cpu_limit, own_groups, read_file

__all__ = ["Cores", "SharedMemory", "find_cores", "find_shared_memory"]

_SHM = "/dev/shm"
_TRIAL_BYTES = 1 << 20


@dataclass(frozen=True)
class Cores:
    """How many cores there are, and how many of them this process may use.

    Attributes:
        machine: cores of the machine.
        affinity: cores that this process is bound to.
        limit: cores' worth of time that its control group allows; None without a limit.
    """

    machine: int
    affinity: int
    limit: float | None

    @property
    def usable(self) -> float:
        """What is left of the machine."""
        return min(self.affinity, self.machine if self.limit is None else self.limit)


@dataclass(frozen=True)
class SharedMemory:
    """Where ranks of a node can share memory.

    Attributes:
        size_bytes: size of /dev/shm; 0 where there is none.
        free_bytes: what is free in it.
        objection: why segments without a name (memfd, reserved in full) do not work, or "".
    """

    size_bytes: int
    free_bytes: int
    objection: str


def find_cores() -> Cores:
    """Look at the cores of this process (local)."""
    return Cores(
        machine=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        limit=cpu_limit(own_groups(), read_file),
    )


def find_shared_memory() -> SharedMemory:
    """Look at /dev/shm, and make a segment of the kind that ranks of a node share (local)."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return SharedMemory(0, 0, _segment_objection())
    return SharedMemory(
        found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, _segment_objection()
    )


def _segment_objection() -> str:
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    try:
        descriptor = os.memfd_create("hvdtrain-check")
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(descriptor, 0, _TRIAL_BYTES)
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
    except OSError as error:
        return f"a memfd cannot be reserved or opened by others: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""
