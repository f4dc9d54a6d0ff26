"""Ranks that end before MPI has started on all: the others would wait in MPI_Init forever.

mpirun ends a job when a rank ends, but not with --with-ft, and MPI itself knows of no rank before
it has started. Beside the four ranks of a host that come first, processes look at all of them
meanwhile; threads could not, because mpi4py holds the interpreter's lock during MPI_Init.
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

# The process starts without packages, to be quick. This one reports the end of a job.
_PACKAGES = str(Path(__file__).resolve().parents[3])

# Each looks at all ranks of the host: one for each rank would be too many.
_WATCHES = 4
_PERIOD_SECONDS = 0.2
# mpirun's daemon starts the ranks of a host one right after the other.
_UNSEEN_SECONDS = 10.0
# How long the daemon has to end its ranks.
_DAEMON_SECONDS = 30.0


@contextmanager
def end_job_if_a_rank_ends(environ: Mapping[str, str]) -> Iterator[None]:
    """End the job if a rank of this host ends within the context; under Open MPI's mpirun only."""
    job, daemon = environ.get("PMIX_NAMESPACE", ""), os.getppid()
    count = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    name = _read(Path(f"/proc/{daemon}/comm")).decode().strip()
    if not job or count == "1" or name not in ("prterun", "prted"):
        yield
        return
    with _place(f"hvdtrain-{job}-{daemon}") as free:
        if not free:
            yield
            return
        title = f"[rank {environ.get('OMPI_COMM_WORLD_RANK', '?')}]"
        words = [sys.executable, "-I", "-S", __file__, str(daemon), job, count, title]
        # Not one of the processes that the daemon ends with this rank: it outlives the daemon.
        with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdin is not None
            try:
                yield
            finally:
                with suppress(OSError):  # the process may have ended the job
                    os.write(process.stdin.fileno(), b"\n")


@contextmanager
def _place(name: str) -> Iterator[bool]:
    """Take a place of those whose processes watch, within the context, if one is free."""
    for number in range(_WATCHES):
        with socket.socket(socket.AF_UNIX) as place:
            try:
                place.bind(f"\0{name}-{number}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
            yield True
            return
    yield False


def main() -> None:
    """Watch the ranks of a host until this one leaves the context, or ends."""
    daemon, job, count, title = sys.argv[1:]
    seen = _ranks(int(daemon), job)
    began = time.monotonic()
    while not select.select([0], [], [], _PERIOD_SECONDS)[0]:
        alive = _ranks(int(daemon), job)
        seen |= alive
        late = len(seen) < int(count) and time.monotonic() - began > _UNSEEN_SECONDS
        if alive and (seen - alive or late):
            _end_job(int(daemon), job, title)
            return
    if not os.read(0, 1):  # the rank has ended
        time.sleep(_PERIOD_SECONDS)  # the daemon may be ending all of them
        if _ranks(int(daemon), job):
            _end_job(int(daemon), job, title)


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
        try:
            sys.path.append(_PACKAGES)
            from hvdtrain import milestones

            milestones.report(milestones.LOST, os.environ)
        finally:
            with suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGTERM)
        os.closerange(0, 3)  # the daemon reads what ranks write until all have closed it
        select.select(ended, [], [], _DAEMON_SECONDS)


def _ranks(daemon: int, job: str) -> set[int]:
    """Return the process IDs of the job's ranks that the daemon has started and that live."""
    mark = f"PMIX_NAMESPACE={job}".encode()
    found = set()
    for path in Path(f"/proc/{daemon}/task").glob("*/children"):
        for child in _read(path).split():
            if mark in _read(Path("/proc", child.decode(), "environ")).split(b"\0"):
                found.add(int(child))
    return found


def _read(path: Path) -> bytes:
    """Return the content of a file; nothing if its process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
