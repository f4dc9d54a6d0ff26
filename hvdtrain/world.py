"""The world as it is announced: rank and size by a launcher, hosts by a discovery script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import HvdtrainError, UsageError


@dataclass(frozen=True)
class PromisedWorld:
    """Rank and size as announced by a launcher."""

    launcher: str
    rank: int
    size: int
    variable: str


OPEN_MPI = "Open MPI's mpirun"
SRUN = "srun"
_HYDRA = "MPICH's or Intel's mpiexec"
# In order of precedence: mpirun in an sbatch job passes on the SLURM_* variables of its daemon.
_SOURCES = (
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH2's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("PALS mpiexec", "PALS_RANKID", "PMI_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    (_HYDRA, "PMI_RANK", "PMI_SIZE"),
    (SRUN, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
TORCHRUN = "torchrun"
_TORCHRUN = (TORCHRUN, "RANK", "WORLD_SIZE")
TORCHRUN_MARKER = "TORCHELASTIC_RUN_ID"
# Environment variable of `run --elastic`: where to report, as KEY@ADDRESS:PORT,ADDRESS:PORT...
SUPERVISOR = "HVDTRAIN_SUPERVISOR"
_MARKERS = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_PORT", "PMI_FD", "PALS_RANKID")


def promised_world(environ: Mapping[str, str]) -> PromisedWorld | None:
    """Return the rank and size from the first launcher whose variables are set and valid."""
    # torchrun's variable names are generic. But if its marker is set, torchrun started this
    # process, and other variables belong to the launcher that started torchrun itself.
    sources = (_TORCHRUN, *_SOURCES) if TORCHRUN_MARKER in environ else (*_SOURCES, _TORCHRUN)
    for launcher, rank_variable, size_variable in sources:
        rank, size = environ.get(rank_variable, ""), environ.get(size_variable, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            if launcher == _HYDRA and _srun_speaks_pmi(environ):
                launcher = SRUN
            return PromisedWorld(launcher, int(rank), int(size), size_variable)
    return None


def refuse_on_ranks(command: str) -> None:
    """Check that no launcher has started this process, for a command that starts ranks itself."""
    promised = promised_world(os.environ)
    if promised is not None and promised.size > 1:
        raise UsageError(f"{command} starts ranks itself: call it without {promised.launcher}")


def _srun_speaks_pmi(environ: Mapping[str, str]) -> bool:
    # The daemons of mpiexec are tasks of srun too, but set MPI_LOCALRANKID for their ranks.
    return "SLURM_STEP_ID" in environ and "MPI_LOCALRANKID" not in environ


def idle_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of unused Slurm tasks besides this process, in the shell of a batch job.

    SLURM_PROCID is 0 there, as for the first task, but the other tasks are not started.
    """
    tasks = environ.get("SLURM_NTASKS", "")
    if not tasks.isdecimal() or "SLURM_STEP_ID" in environ or under_launcher(environ):
        return 0
    return max(0, int(tasks) - 1)


def under_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process, according to its variables."""
    return promised_world(environ) is not None or any(name in environ for name in _MARKERS)


# How long a discovery script may take.
_LIMIT_SECONDS = 30.0


def discover(program: str) -> dict[str, int]:
    """Run a program that prints the hosts of a job, and return the slots of each."""
    import socket  # only here, as subprocess: this module is imported everywhere
    import subprocess

    try:
        done = subprocess.run(
            [os.path.abspath(program)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HvdtrainError(f"{program} cannot be run: {error}") from error
    if done.returncode != 0:
        text = done.stderr.strip().rpartition("\n")[2]
        raise HvdtrainError(f"{program} failed with exit code {done.returncode}: {text}")
    found: dict[str, int] = {}
    for line in done.stdout.split("\n"):
        name, colon, slots = line.strip().partition(":")
        if not name and not colon:
            continue
        count = slots if colon else "1"
        if not name or not count.isdecimal() or not name.isprintable():
            raise HvdtrainError(f"{program} printed {line.strip()!r}: print lines HOST:SLOTS")
        host = socket.gethostname() if name in ("localhost", "127.0.0.1") else name
        found[host] = found.get(host, 0) + int(count)
    return found
