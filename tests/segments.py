"""Shared memory that a job leaves behind."""

from __future__ import annotations

from pathlib import Path

__all__ = ["segments"]

# What Open MPI and MPICH themselves leave behind when a rank is killed.
_OF_MPI = ("sm_segment.", "mpich_", "vader_", "psm2_", "ucx_")


def segments() -> set[str]:
    """Return the shared-memory segments of this machine but those of an MPI library."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(_OF_MPI)}
