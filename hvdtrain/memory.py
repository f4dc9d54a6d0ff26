"""The memory available to this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.control_groups import memory_limit, memory_room, own_groups, read_file


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
