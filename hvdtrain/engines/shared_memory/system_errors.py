"""Errors of the operating system on which all ranks agree.

If a rank cannot share memory, ranks fall back to MPI. If a rank has reached a limit of the system,
they do not: it would fail later, in the middle of an operation, so all ranks raise an error that
names the limit.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvdtrain.errors import SystemLimitError

_FILES = 4096


class SystemFailure(NamedTuple):
    """Why a rank failed to set up shared memory; empty if it did not."""

    reason: str = ""
    limit: str = ""


def failure_from_error(error: Exception, action: str) -> SystemFailure:
    """Return the failure that an error of this rank means."""
    if not isinstance(error, OSError):
        return SystemFailure(f"{action}: {error}")
    reason = f"{action}: {error.strerror or error}"
    return SystemFailure(reason, _limit(error, reason))


def agree_on_failure(failures: Iterable[Sequence[str]]) -> str:
    """Return the first reason among the failures of all ranks, "" for none."""
    reasons = []
    for reason, limit in failures:
        if limit:
            raise SystemLimitError(limit)
        reasons.append(reason)
    return next(filter(None, reasons), "")


def _limit(error: OSError, reason: str) -> str:
    host = socket.gethostname()
    process = f"process {os.getpid()} on {host}"
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = max(_FILES, 2 * soft)
        if 0 <= hard < wanted:
            how = f"have the hard limit of {hard} raised, and set ulimit -n {wanted}"
        else:
            how = f"set ulimit -n {wanted} where the ranks are started"
        return f"{process} has all {soft} files open that it may open ({reason}): {how}"
    if error.errno == errno.ENFILE:
        return (
            f"all files are open that may be open on {host} ({reason}): raise fs.file-max there, "
            "or end what holds them"
        )
    if error.errno == errno.ENOMEM:
        return (
            f"{process} gets no more memory from the system ({reason}): start fewer ranks there, "
            "or raise its limit: ulimit -v, the control group's, vm.max_map_count"
        )
    return ""
