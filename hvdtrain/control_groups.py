"""CPU and memory limits of a process's control groups (cgroups, versions 1 and 2).

A membership is the text of /proc/self/cgroup. Containers may show the path of their group on the
host, which does not exist inside; then the nearest existing parent counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Read = Callable[[Path], str | None]

_ROOT = Path("/sys/fs/cgroup")

# Version 1 represents "no limit" by a very large number.
_NO_LIMIT_BYTES = 1 << 60


def read_file(path: Path) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def own_groups() -> str:
    """Return the membership of this process."""
    return read_file(Path("/proc/self/cgroup")) or ""


def cpu_limit(membership: str, read: Read = read_file) -> float | None:
    """Return the CPU limit of a process in cores; None without a limit.

    The limit is the minimum of quota / period over its groups and their parents.
    """
    limits = []
    for version, folder in _folders(membership, "cpu"):
        words = (read(folder / "cpu.max") or "max").split()
        if version == 1:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [read(folder / name) or "-1" for name in names]
        if words[0] != "max" and int(words[0]) > 0 and int(words[1]) > 0:
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory_limit(membership: str, read: Read = read_file) -> tuple[int, int] | None:
    """Return the memory limit of a process and its group in bytes, and the unused part of it.

    None without a limit. Cached files count as unused.
    """
    limits, rooms = [], []
    for version, folder in _folders(membership, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (read(folder / name) or "max" for name in names[:2])
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
            lines = (read(folder / "memory.stat") or "").splitlines()
            cached = dict(line.split() for line in lines).get(names[2], 0)
            limits.append(int(limit))
            rooms.append(int(limit) - int(used) + int(cached))
    return (min(limits), max(0, min(rooms))) if limits else None


def _folders(membership: str, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of the groups that may limit a process, and of their parents."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield (1 if controllers else 2), folder


@dataclass(frozen=True)
class Memory:
    """The memory of the machine, and the part available to this process."""

    machine_bytes: int
    limit_bytes: int | None
    free_bytes: int


def find_memory() -> Memory:
    """Return the memory of the machine and of this process's control groups."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in text.splitlines())
    machine, free = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, room = memory_limit(own_groups()) or (machine, free)
    return Memory(machine, limit if limit < machine else None, min(free, room))
