"""Flushing of the output of this process before it ends."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat
import sys
import termios
import time

_LONGEST_SECONDS = 1.0
_POLL_SECONDS = 1e-3


def flush_output() -> None:
    """Flush stdout and stderr to the operating system."""
    _release_stderr()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def drain_output() -> None:
    """Flush, and wait for up to a second until pipes have been read.

    A launcher ends at once when a rank aborts the job: MPICH's mpiexec drops output that it has
    not read by then, such as the reason for the abort.
    """
    flush_output()
    deadline = time.monotonic() + _LONGEST_SECONDS
    while any(map(_unread_bytes, (1, 2))) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _release_stderr() -> None:
    """Write what stderr holds in memory to that of the process.

    The exception hook of torch.distributed collects what the hook before it writes, to add a
    prefix, but an exit does not return to it.
    """
    held, own = sys.stderr, sys.__stderr__
    if isinstance(held, io.StringIO) and own is not None:
        with contextlib.suppress(OSError, ValueError):
            own.write(held.getvalue())
            own.flush()
        held.seek(0)
        held.truncate()


def _unread_bytes(descriptor: int) -> int:
    """Return the number of unread bytes in a pipe; 0 if it is not an open pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)
    except OSError:
        return 0
