"""What this machine gives to ranks: cores, and memory that they can share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cores", "SharedMemory", "cgroup_limit", "find_cores", "find_shared_memory"]

_CGROUPS = Path("/sys/fs/cgroup")
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
        limit=cgroup_limit(_read(Path("/proc/self/cgroup")) or "", _read),
    )


def cgroup_limit(membership: str, read: Callable[[Path], str | None]) -> float | None:
    """Return how many cores' worth of time the control groups of a process allow.

    limit = min over the group and its parents of quota / period

    Args:
        membership: the text of /proc/self/cgroup.
        read: returns the text of a file, or None.
    """
    limits: list[float | None] = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS
        group = root / path.lstrip("/")
        folders = [f for f in (group, *group.parents) if f.is_relative_to(root)]
        quota = _quota_of_version_1 if controllers else _quota
        limits += [quota(read, folder) for folder in folders]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(read: Callable[[Path], str | None], folder: Path) -> float | None:
    words = (read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_of_version_1(read: Callable[[Path], str | None], folder: Path) -> float | None:
    quota = int(read(folder / "cpu.cfs_quota_us") or -1)
    period = int(read(folder / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


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


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
