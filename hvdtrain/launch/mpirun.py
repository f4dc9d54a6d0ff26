"""The mpirun command line that starts ranks, for each MPI. Pure: nothing is run or looked up."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["LaunchCommand", "mpirun_command"]

# Where one of these is set mpirun asks the scheduler for hosts, without any hostfile.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "FLUX_URI")

# A remote shell passes no environment on; what decides about results must be the same everywhere.
_FORWARDED = ("HVDTRAIN_", "HOROVOD_", "OMP_NUM_THREADS", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_")


@dataclass(frozen=True)
class LaunchCommand:
    """A command line, and the variables to set beside the inherited ones."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """Return it as one line to paste into a shell."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join([*(["env", *settings] if settings else []), *self.argv])


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
        vendor: "openmpi", "mpich" or "intelmpi".
        program: command and arguments of a rank.
        ranks: how many; None is one for each slot of the hostfile.
        hostfile: in the launcher's own grammar; None is this host.
        environ: the environment in which it will run.
        root: whether the user is root, which Open MPI refuses unless told.
    """
    count = [] if ranks is None else ["-np", str(ranks)]
    if vendor != "openmpi":
        hosts = [] if hostfile is None else ["-f", hostfile]
        return LaunchCommand((mpirun, *hosts, *count, *program))
    here = hostfile is None and not any(name in environ for name in _ALLOCATIONS)
    return LaunchCommand(
        (mpirun, *_open_mpi_flags(hostfile, here, environ), *count, *program),
        _open_mpi_variables(here, environ, root),
    )


def _open_mpi_flags(hostfile: str | None, here: bool, environ: Mapping[str, str]) -> list[str]:
    # Bound to a core, which is the default, a rank would starve its data loaders.
    flags = ["--bind-to", "none"]
    if here:
        # A slot is a physical core: two ranks on a machine with one should run all the same.
        flags.append("--oversubscribe")
    if hostfile is not None:
        flags += ["-hostfile", hostfile]
        for name in sorted(environ):
            if name.startswith(_FORWARDED):
                flags += ["-x", name]
    return flags


def _open_mpi_variables(here: bool, environ: Mapping[str, str], root: bool) -> dict[str, str]:
    variables: dict[str, str] = {}
    if root:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if here:
        # Probing OFI costs a second at the start and finds nothing that one host needs.
        variables |= {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
    return {name: value for name, value in variables.items() if name not in environ}
