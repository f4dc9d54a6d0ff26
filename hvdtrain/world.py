"""What the launcher's environment variables promise about the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OPEN_MPI", "TORCHRUN", "PromisedWorld", "promised_world", "under_launcher"]


@dataclass(frozen=True)
class PromisedWorld:
    """Rank and size that a launcher announced, and which launcher that is."""

    launcher: str
    rank: int
    size: int
    variable: str


OPEN_MPI = "Open MPI's mpirun"
# Trusted in this order: mpirun inside an sbatch job passes on the SLURM_* of its daemon.
_SOURCES = (
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH2's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("PALS mpiexec", "PALS_RANKID", "PMI_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("MPICH's or Intel's mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
TORCHRUN = "torchrun"
_TORCHRUN = (TORCHRUN, "RANK", "WORLD_SIZE")
_TORCHRUN_MARKER = "TORCHELASTIC_RUN_ID"
_MARKERS = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_PORT", "PMI_FD")


def promised_world(environ: Mapping[str, str]) -> PromisedWorld | None:
    """Read the first launcher whose rank and size are both there and make sense."""
    # The names are anybody's; but where its mark is, torchrun started this process, and whatever
    # started the torchrun of each node left its own numbers behind.
    sources = (_TORCHRUN, *_SOURCES) if _TORCHRUN_MARKER in environ else (*_SOURCES, _TORCHRUN)
    for launcher, rank_variable, size_variable in sources:
        rank, size = environ.get(rank_variable, ""), environ.get(size_variable, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return PromisedWorld(launcher, int(rank), int(size), size_variable)
    return None


def under_launcher(environ: Mapping[str, str]) -> bool:
    """Tell whether a launcher started this process, as far as variables can tell."""
    return promised_world(environ) is not None or any(name in environ for name in _MARKERS)
