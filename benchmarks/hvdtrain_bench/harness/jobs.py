"""Start the processes of a job, wait for them for a limited time, and leave none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.launchers.choice import own_launcher
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.launch.supervise import SESSION, bound_to_this_process, session_folder
from hvdtrain_bench.harness.results import MeasurementSettings, Result, result_of

# No benchmark takes this long, even on a slow machine, unless it hangs.
_LIMIT_SECONDS = 2 * 3600.0
_PERIOD_SECONDS, _GRACE_SECONDS = 0.05, 3.0
# Inherited by all processes of a job, so that they are found whoever their parent is.
_MARK = "HVDTRAIN_BENCH_JOB"

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Command:
    argv: Sequence[str]
    environ: Mapping[str, str]


@contextmanager
def running(commands: Sequence[Command], output: BinaryIO | None = None) -> Iterator[list[Process]]:
    """Start processes, and end them and all that they have started with the block."""
    mark = uuid.uuid4().hex
    processes: list[Process] = []
    with session_folder(os.environ) as session:
        own = {_MARK: mark, SESSION: session.folder}
        try:
            for command in commands:
                environ = {**command.environ, **own}
                processes.append(_start(command.argv, environ, output, session.lifeline))
            yield processes
        finally:
            _end(mark, processes)


@dataclass(frozen=True)
class JobEnd:
    code: int
    late: bool = False


def wait(started: Sequence[Process], limit: float) -> JobEnd:
    """Wait for processes until they have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + limit
    while True:
        codes = [process.poll() for process in started]
        failed = next((code for code in codes if code), 0)
        if failed or None not in codes:
            return JobEnd(failed)
        if time.monotonic() > deadline:
            return JobEnd(0, late=True)
        time.sleep(_PERIOD_SECONDS)


def _start(
    argv: Sequence[str], environ: Mapping[str, str], output: BinaryIO | None, lifeline: int
) -> Process:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=[lifeline],
        start_new_session=True,  # Ctrl-C ends this process, which ends them
        preexec_fn=bound_to_this_process(mask, lifeline),
    )


def _end(mark: str, processes: Sequence[Process]) -> None:
    """End all processes of a job: politely at first, so that an mpirun removes its files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while _marked(mark) and time.monotonic() < deadline:
            for process in processes:
                process.poll()
            time.sleep(_PERIOD_SECONDS)
    for process in processes:
        process.wait()


def _marked(mark: str) -> list[int]:
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended in the meantime, or is another user's
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@dataclass(frozen=True)
class RankLauncher:
    library: MpiLibrary
    mpirun: Path
    hostfile: str | None  # hosts of the ranks; None for this host
    threads: int

    @classmethod
    def find(cls, hostfile: str | None, threads: int) -> RankLauncher:
        library = loaded_library()
        return cls(library, find_mpirun(library), hostfile, threads)

    def command(self, ranks: int, *words: object, elastic: bool = False) -> Command:
        """Return how to start ranks that run a module of Python."""
        environ = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        program = (sys.executable, "-m", *map(str, words))
        asked = LaunchRequest(program, ranks=ranks, hostfile=self.hostfile, elastic=elastic)
        line = own_launcher(self.library, str(self.mpirun)).command(asked, environ)
        return Command(line.argv, {**environ, **line.variables})


def run_job(
    launcher: RankLauncher, kind: str, ranks: int, settings: MeasurementSettings, folder: Path
) -> Result:
    file = (folder / f"{kind}-{ranks}.part").resolve()
    words = ["hvdtrain_bench.worker", kind, settings.to_json(), launcher.threads, file]
    try:
        with running([launcher.command(ranks, *words)]) as started:
            end = wait(started, _LIMIT_SECONDS)
        if end.late:
            raise HvdtrainError(f"the ranks did not end within {_LIMIT_SECONDS:.0f} s")
        if end.code or not file.exists():
            raise HvdtrainError(
                f"bench {kind}: {ranks} ranks ended with exit code {end.code}; their messages say "
                "why"
            )
        return result_of(json.loads(file.read_text(encoding="utf-8")))
    finally:
        file.unlink(missing_ok=True)
