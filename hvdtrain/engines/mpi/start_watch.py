"""Ranks that end before MPI has started on all: the others would wait in MPI_Init forever.

mpirun ends a job when a rank ends, but not with --with-ft, and MPI itself knows of no rank before
it has started. Processes beside four ranks of a host look at all of them meanwhile; threads could
not, because mpi4py holds the interpreter's lock during MPI_Init.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# The process has no packages, so that it starts at once, but for this one, when it ends a job.
_PACKAGES = str(Path(__file__).resolve().parents[3])

_PERIOD_SECONDS = 0.2
# mpirun's daemon starts the ranks of a host one right after the other.
_UNSEEN_SECONDS = 10.0
# How long the daemon has to end its ranks.
_DAEMON_SECONDS = 30.0


@contextmanager
def end_job_if_a_rank_ends(environ: Mapping[str, str]) -> Iterator[None]:
    """End the job if a rank of this host ends within the context; under Open MPI's mpirun only."""
    job, daemon = environ.get("PMIX_NAMESPACE", ""), os.getppid()
    count = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    # What ends only the first, or all others, every second one, or one half leaves one of these.
    looking = {str(rank) for rank in (0, 1, count // 2, count - 1)}
    watching = environ.get("OMPI_COMM_WORLD_LOCAL_RANK") in looking
    name = _read(Path(f"/proc/{daemon}/comm")).decode().strip()
    if not job or count == 1 or not watching or name not in ("prterun", "prted"):
        yield
        return
    title = f"[rank {environ.get('OMPI_COMM_WORLD_RANK', '?')}]"
    words = [sys.executable, "-I", "-S", __file__, str(daemon), job, str(count), title]
    # Not one of the processes that the daemon ends with this rank: it outlives the daemon.
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True):
        yield


def main() -> None:
    """Watch the ranks of a host until this one closes its end of standard input, or ends."""
    daemon, job, count, title = sys.argv[1:]
    seen: set[int] = set()
    began = time.monotonic()
    while not select.select([sys.stdin], [], [], _PERIOD_SECONDS)[0]:
        alive = _ranks(int(daemon), job, seen)
        seen |= alive
        late = len(seen) < int(count) and time.monotonic() - began > _UNSEEN_SECONDS
        if alive and (seen - alive or late):
            _end_job(int(daemon), job, title)
            return


def _end_job(daemon: int, job: str, title: str) -> None:
    """End the job and say so, unless the process beside another rank of this host does."""
    with socket.socket(socket.AF_UNIX) as first:
        try:
            first.bind(f"\0hvdtrain-{job}-{daemon}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
        ended: list[int] = []
        with suppress(OSError):  # old kernels and some containers have no pidfd
            ended.append(os.pidfd_open(daemon))
        text = f"{title} init: a rank of this host ended before all had started"
        with suppress(OSError):  # stderr may be closed
            print(f"{text}: the job ends", file=sys.stderr, flush=True)
        sys.path.append(_PACKAGES)
        from hvdtrain import milestones

        milestones.report(milestones.LOST, os.environ)
        with suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGTERM)
        os.closerange(0, 3)  # the daemon reads what ranks write until all have closed it
        select.select(ended, [], [], _DAEMON_SECONDS)


def _ranks(daemon: int, job: str, known: set[int]) -> set[int]:
    """Return the process IDs of the job's ranks that the daemon has started and that live."""
    mark = f"PMIX_NAMESPACE={job}".encode()
    found = set()
    for path in Path(f"/proc/{daemon}/task").glob("*/children"):
        for child in map(int, _read(path).split()):
            if child in known or mark in _read(Path(f"/proc/{child}/environ")).split(b"\0"):
                found.add(child)
    return found


def _read(path: Path) -> bytes:
    """Return the content of a file; nothing if its process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
