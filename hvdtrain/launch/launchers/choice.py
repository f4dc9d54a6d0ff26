"""The choice of the launcher: that of the installed MPI, or that of the scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.batch import jsrun, pals, srun
from hvdtrain.launch.launchers.hydra import intel_mpi, mpich
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun
from hvdtrain.launch.launchers.open_mpi import open_mpi_4, open_mpi_5
from hvdtrain.launch.launchers.request import Builder

LAUNCHERS = ("mpirun", "srun", "jsrun", "pals")


@dataclass(frozen=True)
class Launcher:
    """A launcher of ranks."""

    name: str
    path: str
    build: Builder


@dataclass(frozen=True)
class _OfScheduler:
    program: str
    job: str
    build: Builder


_OF_SCHEDULERS = {
    "srun": _OfScheduler("srun", "SLURM_JOB_ID", srun),
    "jsrun": _OfScheduler("jsrun", "LSB_JOBID", jsrun),
    "pals": _OfScheduler("mpiexec", "PBS_JOBID", pals),
}


def own_builder(library: MpiLibrary) -> Builder:
    """Return the builder of command lines for the launcher that belongs to an MPI library."""
    if library.vendor == "openmpi":
        return open_mpi_4 if library.major == "4" else open_mpi_5
    return intel_mpi if library.vendor == "intelmpi" else mpich


def choose_launcher(
    name: str | None, library: MpiLibrary, environ: Mapping[str, str], *, missing_ok: bool = False
) -> Launcher:
    """Find the launcher `name`; by default that of the MPI library, else that of the scheduler."""
    if name in _OF_SCHEDULERS:
        found = _of_scheduler(name)
        if found is None and not missing_ok:
            program = _OF_SCHEDULERS[name].program
            raise UsageError(
                f"--launcher {name}: there is no {program} on PATH that belongs to {name}"
            )
        return found or Launcher(name, _OF_SCHEDULERS[name].program, _OF_SCHEDULERS[name].build)
    try:
        return Launcher("mpirun", str(find_mpirun(library)), own_builder(library))
    except UsageError:
        for other, scheduler in _OF_SCHEDULERS.items():
            if name is None and scheduler.job in environ and (found := _of_scheduler(other)):
                return found
        raise


def _of_scheduler(name: str) -> Launcher | None:
    scheduler = _OF_SCHEDULERS[name]
    path = shutil.which(scheduler.program)
    # Every MPI has an mpiexec; that of PALS is in a directory of that name.
    if path is None or (name == "pals" and "pals" not in path):
        return None
    return Launcher(name, path, scheduler.build)
