"""CPU and memory limits of a process's control groups (cgroups, versions 1 and 2).

Functions take the text of /proc/self/cgroup and a function that reads files, `read_file` for real
ones. Containers may show the path of their group on the host, which does not exist inside; then the
nearest existing parent counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Read = Callable[[Path], str | None]

_ROOT = Path("/sys/fs/cgroup")

# Version 1 represents "no limit" by a very large number.
_NO_LIMIT_BYTES = 1 << 60


def own_groups() -> str:
    """Return the text of /proc/self/cgroup."""
    return read_file(Path("/proc/self/cgroup")) or ""


def read_file(path: Path) -> str | None:
    """Return the text of a file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def cpu_limit(membership: str, read: Read) -> float | None:
    """Return the CPU limit of a process in cores; None without a limit.

    The limit is the minimum of quota / period over its groups and their parents.
    """
    limits = [
        _quota(read, folder) if version == 2 else _quota_of_version_1(read, folder)
        for version, folder in _folders(membership, "cpu")
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_limit(membership: str, read: Read) -> int | None:
    """Return the memory limit of a process and its group in bytes; None without a limit."""
    return min((limit for limit, _ in _memory(membership, read)), default=None)


def memory_room(membership: str, read: Read) -> int | None:
    """Return the unused part of the memory limit in bytes; None without a limit.

    Cached files count as unused.
    """
    rooms = [limit - used for limit, used in _memory(membership, read)]
    return max(0, min(rooms)) if rooms else None


def _memory(membership: str, read: Read) -> Iterator[tuple[int, int]]:
    """Yield the limit and usage in bytes of each group with a limit."""
    for version, folder in _folders(membership, "memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = (read(folder / name) or "max" for name in names[:2])
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
            lines = (read(folder / "memory.stat") or "").splitlines()
            statistics = dict(line.split() for line in lines)
            yield int(limit), int(used) - int(statistics.get(names[2], 0))


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


def _quota(read: Read, folder: Path) -> float | None:
    words = (read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_of_version_1(read: Read, folder: Path) -> float | None:
    quota = int(read(folder / "cpu.cfs_quota_us") or -1)
    period = int(read(folder / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


@dataclass(frozen=True)
class Memory:
    """The memory of the machine, and the part available to this process."""

    machine_bytes: int
    limit_bytes: int | None
    free_bytes: int


def find_memory() -> Memory:
    """Return the memory of the machine and of this process's control groups."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines())
    machine, free = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    groups = own_groups()
    limit, room = memory_limit(groups, read_file), memory_room(groups, read_file)
    return Memory(
        machine_bytes=machine,
        limit_bytes=limit if limit is not None and limit < machine else None,
        free_bytes=free if room is None else min(free, room),
    )
