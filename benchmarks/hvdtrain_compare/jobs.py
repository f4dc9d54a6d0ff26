"""Start the processes of a contender, wait for them for a limited time, and leave none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hvdtrain.launch.cluster_environment import (
    LOOPBACK,
    ClusterRank,
    free_ports,
    jax_variables,
    tensorflow_config,
    torch_variables,
)
from hvdtrain.launch.launchers.choice import mpirun_command
from hvdtrain.launch.launchers.mpi_library import find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import without_allocation
from hvdtrain.launch.supervise import SESSION, bound_to_this_process, session_folder
from hvdtrain_compare.protocol import Launch, Strategy

_PERIOD_SECONDS = 0.05
_GRACE_SECONDS = 3.0
# Inherited by all processes of a job, so that they are found whoever their parent is.
_MARK = "HVDTRAIN_COMPARE_JOB"
# Where they are set, ranks believe them rather than mpirun, and all take themselves for one rank.
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    code: int
    late: bool = False


@dataclass(frozen=True)
class _Command:
    argv: Sequence[str]
    variables: Mapping[str, str]


def run_job(
    strategy: Strategy, ranks: int, task: Path, log: Path, python: str | None, limit: float
) -> JobEnd:
    """Run the processes of a contender on this host until all have ended, or one has failed."""
    mark = uuid.uuid4().hex
    # The ranks compute on the CPU, whatever there is, and meet on this host alone.
    common = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", _MARK: mark}
    common |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    worker = [python or sys.executable, "-m", "hvdtrain_compare.worker", str(task)]
    inherited = _inherited(os.environ)
    running: list[subprocess.Popen[bytes]] = []
    with session_folder(os.environ) as session, log.open("ab") as output:
        common[SESSION] = session.folder
        try:
            for command in _commands(strategy, ranks, worker, inherited):
                environ = {**inherited, **common, **command.variables}
                running.append(_start(command.argv, environ, output, session.lifeline))
            awaited = running[:1] if strategy.helpers else running
            return _wait(running, awaited, time.monotonic() + limit)
        finally:
            _end(mark, running)


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what processes inherit: nothing of a scheduler's or torchrun's that ranks go by."""
    kept = without_allocation(environ)
    return {name: value for name, value in kept.items() if name not in _OF_TORCHRUN}


def _commands(
    strategy: Strategy, ranks: int, worker: Sequence[str], environ: Mapping[str, str]
) -> Iterator[_Command]:
    """Yield the processes to start: one mpirun, or the ranks themselves."""
    if strategy.launch is Launch.MPI:
        library = loaded_library(worker[0])
        line = mpirun_command(
            str(find_mpirun(library)),
            library.vendor,
            worker,
            ranks=ranks,
            environ=environ,
        )
        yield _Command(line.argv, line.variables)
        return
    roles = strategy.roles(ranks)
    size = len(roles)
    addresses = tuple(f"{LOOPBACK}:{port}" for port in free_ports(size, LOOPBACK))
    for rank in range(size):
        place = ClusterRank(rank, size, rank, size, 0, addresses)
        variables = torch_variables(place) | jax_variables(place)
        if strategy.launch is Launch.PROCESSES:
            variables["TF_CONFIG"] = tensorflow_config(place, roles)
        yield _Command(worker, variables)


def _start(
    argv: Sequence[str], environ: Mapping[str, str], output: BinaryIO, lifeline: int
) -> subprocess.Popen[bytes]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[lifeline],
        start_new_session=True,  # Ctrl-C ends this process, which ends them
        preexec_fn=bound_to_this_process(mask, lifeline),
    )


def _wait(
    running: Sequence[subprocess.Popen[bytes]],
    awaited: Sequence[subprocess.Popen[bytes]],
    deadline: float,
) -> JobEnd:
    while True:
        codes = [process.poll() for process in running]
        failed = next((code for code in codes if code), 0)
        if failed or all(process.returncode is not None for process in awaited):
            return JobEnd(failed)
        if time.monotonic() > deadline:
            return JobEnd(0, late=True)
        time.sleep(_PERIOD_SECONDS)


def _end(mark: str, running: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all processes of a job: politely at first, so that an mpirun removes its files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while _marked(mark) and time.monotonic() < deadline:
            for process in running:
                process.poll()
            time.sleep(_PERIOD_SECONDS)
    for process in running:
        process.wait()


def _marked(mark: str) -> list[int]:
    """Return the processes of a job that have not ended."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended in the meantime, or is another user's
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
