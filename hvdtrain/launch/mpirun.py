"""The command line of a job with the launcher that belongs to an MPI. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.launch.launchers.hydra import mpich
from hvdtrain.launch.launchers.open_mpi import open_mpi_5
from hvdtrain.launch.launchers.request import LaunchCommand, LaunchRequest, Site


def mpirun_command(
    mpirun: str,
    vendor: str,
    program: Sequence[str],
    *,
    ranks: int | None,
    hostfile: str | None,
    environ: Mapping[str, str],
    root: bool,
    elastic: bool = False,
) -> LaunchCommand:
    """Return the command line that runs `program` on every rank."""
    build = open_mpi_5 if vendor == "openmpi" else mpich
    request = LaunchRequest(tuple(program), ranks=ranks, hostfile=hostfile, elastic=elastic)
    return build(request, Site(mpirun, vendor, environ, root))
