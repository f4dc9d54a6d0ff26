"""What the system refuses, in words that all ranks agree on.

A rank that cannot share memory is got around: ranks then meet in another way. One that has
reached a limit of the system is not: it would fail later, in the middle of something, so all
ranks are told which limit that is.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvdtrain.errors import SystemLimitError

__all__ = ["Objection", "objection_to", "settle"]

_FILES = 4096


class Objection(NamedTuple):
    """Why a rank cannot do its part; without words if it can.

    Attributes:
        reason: what the system said.
        limit: which limit of the system has been reached, and what to do; "" for another reason.
    """

    reason: str = ""
    limit: str = ""


def objection_to(error: Exception, what: str) -> Objection:
    """Return the objection of this rank after an error of the system (local).

    Args:
        error: of the system, or of Python where it has no such call.
        what: was tried.
    """
    if not isinstance(error, OSError):
        return Objection(f"{what}: {error}")
    reason = f"{what}: {error.strerror or error}"
    return Objection(reason, _limit(error, reason))


def settle(objections: Iterable[Sequence[str]]) -> str:
    """Return the first reason among the objections of all ranks, "" for none (local).

    Args:
        objections: what was gathered; JSON makes lists of them.

    Raises:
        SystemLimitError: a rank has reached a limit; all ranks that are given the same objections
            say the same.
    """
    reasons = []
    for reason, limit in objections:
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
