"""What this process has printed, on its way to whoever reads it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import termios
import time

__all__ = ["drain_output", "flush_output"]

_LONGEST_SECONDS = 1.0
_POLL_SECONDS = 1e-3


def flush_output() -> None:
    """Hand what is buffered in this process to the operating system (local)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def drain_output() -> None:
    """Flush, and wait a moment until what is in pipes has been read (local).

    A launcher that is told to abort the job ends at once: MPICH's mpiexec drops what a rank has
    printed that it has not read by then, the reason of the abort for example.
    """
    flush_output()
    deadline = time.monotonic() + _LONGEST_SECONDS
    while any(map(_unread_bytes, (1, 2))) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _unread_bytes(descriptor: int) -> int:
    """Return how much of a pipe nobody has read; 0 for what is not an open pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)
    except OSError:
        return 0
