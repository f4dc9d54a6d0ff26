"""The names of Open MPI's own shared memory, which stay behind if a rank is killed."""

from __future__ import annotations

from pathlib import Path

_OF_OPEN_MPI = "/dev/shm/sm_segment."


def remove_segment_names() -> None:
    """Remove the names of the segments that this rank has mapped.

    Call it once all ranks of this host have mapped each other's. They then need no names, and what
    has none is freed with the last rank that uses it, however ranks end.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")
        if (path[1] + path[2]).startswith(_OF_OPEN_MPI):
            Path(path[1] + path[2].removesuffix(" (deleted)")).unlink(missing_ok=True)
