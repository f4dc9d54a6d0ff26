"""A temporary directory for the files of one job, removed however the job ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from hvdtrain.errors import UsageError

# Where Open MPI 5 keeps the files of its jobs, and those of one on this host.
_SESSIONS, SESSION = "PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"

_SHELL = "/bin/sh"
# The subshell is an orphan, and survives signals that are sent to all processes of a job. Its input
# ends when this process does. From the lifeline it reads the launcher's process ID, then the end of
# the launcher.
_CLEANUP = """
exec 3<&0 4<"/dev/fd/$1"
(
    trap '' HUP INT TERM
    read -r launcher <&4
    read -r _ <&3 && exit
    timeout -s KILL "$2" cat <&4 || kill -KILL "$launcher"
    rm -rf -- "$0"
) &
"""
# Time for the launcher to end after this process. An mpirun of Open MPI 5 that is told to end while
# its ranks end by themselves may deadlock on a lock that it holds itself.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Session:
    """The resources of one job."""

    folder: str
    lifeline: int


@contextmanager
def session_folder(environ: Mapping[str, str]) -> Iterator[Session]:
    """Make the directory, which is removed with its block, or with this process and the launcher.

    An mpirun that is killed leaves files named by its process ID, on which a later one with that ID
    fails: so each has a directory of its own.
    """
    base = environ.get(_SESSIONS)
    parent = os.path.abspath(base) if base else None  # the cleanup runs in another directory
    try:
        temporary = tempfile.TemporaryDirectory(
            prefix="hvdtrain-run-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(f"cannot create a directory: {error}") from None
    with temporary as folder, _cleaned_up(folder) as lifeline:
        yield Session(folder, lifeline)


@contextmanager
def _cleaned_up(folder: str) -> Iterator[int]:
    """Kill the launcher and remove the directory if this process cannot do so itself."""
    with ExitStack() as ends:
        waiting, block = _pipe(ends)  # no other process has the write end
        listening, lifeline = _pipe(ends)
        _start_cleanup(folder, waiting, listening)
        try:
            yield lifeline
        finally:
            with contextlib.suppress(OSError):  # it has been ended from outside
                os.write(block, b"\n")


def _pipe(ends: ExitStack) -> tuple[int, int]:
    pair = os.pipe()
    for end in pair:
        ends.callback(os.close, end)
    return pair


def _start_cleanup(folder: str, waiting: int, listening: int) -> None:
    try:
        subprocess.run(
            [_SHELL, "-c", _CLEANUP, folder, str(listening), str(_GRACE_SECONDS)],
            stdin=waiting,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=[listening],
            start_new_session=True,  # Ctrl-C must not reach it
            check=False,
        )
    except OSError as error:
        raise UsageError(f"cannot start {_SHELL}, which removes {folder}: {error}") from None
