"""The command line of a job with the launcher that belongs to an MPI. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.launch.launchers.hydra import mpich
from hvdtrain.launch.launchers.open_mpi import open_mpi_5
from hvdtrain.launch.launchers.request import LaunchCommand, LaunchRequest, Site

__all__ = ["LaunchCommand", "mpirun_command"]


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
    """Return the command line that runs `program` on every rank.

    Args:
        mpirun: launcher.
        vendor: "openmpi", "mpich" or "intelmpi"; the versions of each differ only in options.
        program: command and arguments of a rank.
        ranks: number of ranks; None for one per slot of the hostfile.
        hostfile: file with hosts in the launcher's own format; None for this host.
        environ: environment variables of the launcher.
        root: whether the user is root, which Open MPI refuses unless told otherwise.
        elastic: whether the other ranks go on when one is killed.
    """
    build = open_mpi_5 if vendor == "openmpi" else mpich
    request = LaunchRequest(tuple(program), ranks=ranks, hostfile=hostfile, elastic=elastic)
    return build(request, Site(mpirun, vendor, environ, root))
