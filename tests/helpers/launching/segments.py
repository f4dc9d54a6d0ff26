"""Shared memory that a job leaves behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What Open MPI and MPICH themselves leave behind when a rank is killed.
_OF_MPI = ("sm_segment.", "mpich_", "vader_", "psm2_", "ucx_")
# Semaphores, of which a test beside this one may have some that Python never removes.
_NO_SEGMENTS = ("sem.",)
_PATIENCE_SECONDS = 30.0


@contextmanager
def no_new_segments() -> Iterator[None]:
    """Fail a block that leaves a segment in /dev/shm, where other tests have some for a while."""
    before = _segments()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while left := _segments() - before:
        assert time.monotonic() < deadline, f"left in /dev/shm: {sorted(left)}"
        time.sleep(0.05)


def _segments() -> set[str]:
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith(_OF_MPI + _NO_SEGMENTS)}
