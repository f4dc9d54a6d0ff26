"""The command line of a plain job under the launcher that comes with an MPI. Pure."""

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
) -> LaunchCommand:
    """Build the command line that runs `program` on every rank.

    Args:
        mpirun: the launcher.
        vendor: "openmpi", "mpich" or "intelmpi"; their versions differ only in options.
        program: command and arguments of a rank.
        ranks: how many; None is one for each slot of the hostfile.
        hostfile: in the launcher's own grammar; None is this host.
        environ: the environment in which it will run.
        root: whether the user is root, which Open MPI refuses unless told.
    """
    build = open_mpi_5 if vendor == "openmpi" else mpich
    request = LaunchRequest(tuple(program), ranks=ranks, hostfile=hostfile)
    return build(request, Site(mpirun, vendor, environ, root))
