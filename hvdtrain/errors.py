"""Exceptions of hvdtrain, the exit codes they lead to, and what messages advise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

__all__ = [
    "EXIT_CRASH",
    "EXIT_INTERRUPTED",
    "EXIT_MISMATCH",
    "EXIT_REQUEUE",
    "EXIT_TERMINATED",
    "EXIT_USAGE",
    "STOPPING",
    "ConnectionLostError",
    "EngineUnavailableError",
    "ExcludedError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "HvdtrainError",
    "LauncherMismatchError",
    "MismatchError",
    "NotFiniteError",
    "NotInitializedError",
    "OneRankError",
    "OneRankTrainingError",
    "PeerFailureError",
    "RanksLostError",
    "RecipeError",
    "SystemLimitError",
    "TooFewRanksError",
    "TooManyPassesError",
    "TrainingError",
    "UnsupportedError",
    "UsageError",
]

# The mpiexec of MPICH joins the codes of ranks by |, so none is made of others.
EXIT_CRASH = 1
EXIT_USAGE = 2
# Schedulers that requeue jobs by their exit code take this one, EX_TEMPFAIL of sysexits.h.
EXIT_REQUEUE = 75
EXIT_MISMATCH = 78  # EX_CONFIG
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

# The answer of `run` and `train` to the first Ctrl-C.
STOPPING = "hvdtrain: stopping after this step; Ctrl-C again ends the job at once"


class HvdtrainError(RuntimeError):
    """Base class of hvdtrain's errors."""

    exit_code = EXIT_CRASH


class NotInitializedError(HvdtrainError, ValueError):
    """An operation was called before init() or after shutdown(); in Horovod a ValueError."""


class EngineUnavailableError(HvdtrainError):
    """The requested engine cannot be loaded here."""

    exit_code = EXIT_USAGE


class LauncherMismatchError(HvdtrainError):
    """The world that MPI formed differs from the one that the launcher announced."""

    exit_code = EXIT_MISMATCH


class MismatchError(HvdtrainError):
    """Ranks submitted different requests where they must be equal."""


class TrainingError(HvdtrainError):
    """Training cannot continue, as detected by all ranks together; no traceback is needed."""


class NotFiniteError(TrainingError):
    """A loss or a gradient is not finite."""


class TooFewRanksError(TrainingError):
    """Fewer ranks are left than --min-np asks for; the state is saved, to start again with more."""

    exit_code = EXIT_REQUEUE


class PeerFailureError(HvdtrainError):
    """Another rank ended or failed while this one was waiting for it."""


class RanksLostError(PeerFailureError):
    """Ranks have ended, and the others can continue without them.

    Args:
        message: what has happened.
        ranks: ranks that have ended, as far as this rank knows; others may know of more.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ExcludedError(HvdtrainError):
    """Other ranks have taken this one for dead, and continued without it."""


class ConnectionLostError(PeerFailureError):
    """The connection to another rank broke because that rank ended."""


class UnsupportedError(HvdtrainError, ValueError):
    """The engine does not support an operation, dtype or device; in Horovod a ValueError."""


class TooManyPassesError(HvdtrainError, AssertionError):
    """Gradients were computed more often than backward_passes_per_step before step().

    Args:
        name: name of a parameter.
        passes: backward passes per step.
        nested: whether backward() was called within backward().
    """

    def __init__(self, name: str, passes: int, nested: bool = False) -> None:
        super().__init__(
            f"one backward() computed the gradient of {name!r} more than once, as it does with "
            "torch.utils.checkpoint(..., use_reentrant=True) around a layer that is used several "
            "times: pass use_reentrant=False"
            if nested
            else f"the gradient of {name!r} was computed more than "
            f"backward_passes_per_step={passes} times before step(): call optimizer.step() or "
            "optimizer.zero_grad() in between, or increase it"
        )


class RecipeError(HvdtrainError):
    """The user's recipe raised an error, which is the cause."""


class UsageError(HvdtrainError):
    """Invalid input from the user, reported in one line without a traceback."""

    exit_code = EXIT_USAGE


class SystemLimitError(UsageError):
    """A rank has reached a limit of files or memory; all ranks concerned raise the same error."""


class OneRankError(UsageError):
    """Invalid input that possibly this rank alone has found: it reports it and ends the job."""


class OneRankTrainingError(OneRankError):
    """Training cannot continue, as this rank alone has found: it reports it and ends the job."""

    exit_code = EXIT_CRASH


# Horovod's name for the errors of its operations.
HorovodInternalError = HvdtrainError


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod's signal that hosts were added or removed; never raised in a world of fixed size.

    Args:
        skip_sync: whether the state is equal on all ranks and need not be synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean NAME?" for the nearest known name; "" if none is near."""
    near = nearest_name(name, known)
    return f": did you mean {near}?" if near else ""


def nearest_name(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that is most like another one; None if none is near."""
    return next(iter(get_close_matches(name, list(known), 1, likeness)), None)


def require_version(need: str, package: str, found: str, oldest: str) -> None:
    """Check the version of a framework."""
    least = _numbers(oldest)
    if _numbers(found)[: len(least)] < least:
        raise UsageError(f"{need} >= {oldest}, found {found}: pip install '{package}>={oldest}'")


def mpi_remedy(reason: str, usual: str) -> str:
    """Return what to do where mpi4py loads no MPI library, by the error that it gives."""
    if "libmpi_abi" in reason:
        return "it is built for MPI's standard ABI: pip install 'mpich>=5', or reinstall mpi4py"
    if "cannot import name 'MPI'" in reason:
        return (
            "it is not built for this library's ABI: name another library, or build it with "
            "MPI4PY_BUILD_MPIABI=1 MPICC=mpicc_abi pip install --force-reinstall --no-binary "
            "mpi4py mpi4py"
        )
    return usual


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
