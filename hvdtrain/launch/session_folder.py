"""A folder for the files of one job, which goes with the job, however that ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from hvdtrain.errors import UsageError

__all__ = ["SESSION", "Session", "session_folder"]

# Where Open MPI 5 keeps the files of its jobs, and those of one on this host.
_SESSIONS, SESSION = "PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"

_SHELL = "/bin/sh"
# The subshell is nobody's child, and waits for a line, or for the end of all that could write one.
_REMOVER = 'exec 3<&0; (read -r _ <&3 || rm -rf -- "$0") & '


@dataclass(frozen=True)
class Session:
    """What one job needs.

    Attributes:
        folder: for its files.
        lifeline: a descriptor for the launcher to inherit. The folder is removed when all who have
            it have ended, also where this process was killed.
    """

    folder: str
    lifeline: int


@contextmanager
def session_folder(environ: Mapping[str, str]) -> Iterator[Session]:
    """Make the folder, which goes with its block, or with this process and the launcher.

    An mpirun that is killed leaves files named by its process number, on which a later one with
    that number fails: each has its own place.

    Raises:
        UsageError: it cannot be made, or nothing could remove it.
    """
    base = environ.get(_SESSIONS)
    parent = os.path.abspath(base) if base else None  # the remover is at work in another directory
    try:
        temporary = tempfile.TemporaryDirectory(
            prefix="hvdtrain-run-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(f"cannot make a folder: {error}") from None
    with temporary as folder, _removed_at_the_latest(folder) as lifeline:
        yield Session(folder, lifeline)


@contextmanager
def _removed_at_the_latest(folder: str) -> Iterator[int]:
    """Have a folder removed when the descriptor is closed everywhere, unless the block ends."""
    listening, lifeline = os.pipe()
    try:
        with os.fdopen(listening, "rb") as end:
            _start_remover(folder, end)
        yield lifeline
    finally:
        with contextlib.suppress(OSError):  # somebody has ended it
            os.write(lifeline, b"\n")
        os.close(lifeline)


def _start_remover(folder: str, end: BinaryIO) -> None:
    try:
        subprocess.run(
            [_SHELL, "-c", _REMOVER, folder],
            stdin=end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is not for it
            check=False,
        )
    except OSError as error:
        raise UsageError(f"cannot start {_SHELL}, which removes {folder}: {error}") from None
