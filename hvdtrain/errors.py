"""Exceptions of hvdtrain and the exit codes they lead to."""

from __future__ import annotations

__all__ = [
    "EXIT_CRASH",
    "EXIT_INTERRUPTED",
    "EXIT_MISMATCH",
    "EXIT_TERMINATED",
    "EXIT_USAGE",
    "ConnectionLostError",
    "EngineUnavailableError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "HvdtrainError",
    "LauncherMismatchError",
    "MismatchError",
    "NotInitializedError",
    "OneRankError",
    "PeerFailureError",
    "RecipeError",
    "SystemLimitError",
    "TooManyPassesError",
    "TrainingError",
    "UnsupportedError",
    "UsageError",
]

EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_MISMATCH = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class HvdtrainError(RuntimeError):
    """Base of every error that hvdtrain raises on its own account."""

    exit_code = EXIT_CRASH


class NotInitializedError(HvdtrainError, ValueError):
    """An operation was asked for before init() or after shutdown(); Horovod's is a ValueError."""


class EngineUnavailableError(HvdtrainError):
    """The engine that was asked for cannot be loaded here."""

    exit_code = EXIT_USAGE


class LauncherMismatchError(HvdtrainError):
    """The world that MPI formed is not the one that the launcher promised."""

    exit_code = EXIT_MISMATCH


class MismatchError(HvdtrainError):
    """Ranks submitted different requests where they must submit the same one."""


class TrainingError(HvdtrainError):
    """Training cannot go on, found by all ranks together; the message says all there is to say."""


class PeerFailureError(HvdtrainError):
    """Another rank left the job or failed while this one was waiting for it."""


class ConnectionLostError(PeerFailureError):
    """The connection to another rank broke, because that rank has ended."""


class UnsupportedError(HvdtrainError, ValueError):
    """The engine lacks this operation, element type or device; Horovod's is a ValueError."""


class TooManyPassesError(HvdtrainError, AssertionError):
    """Gradients were computed more often than backward_passes_per_step before step().

    Args:
        name: of a parameter.
        passes: backward passes for each step.
    """

    def __init__(self, name: str, passes: int) -> None:
        super().__init__(
            f"the gradient of {name!r} was computed more than backward_passes_per_step={passes} "
            "times before step(): call optimizer.step() or optimizer.zero_grad() in between, or "
            "increase it"
        )


class RecipeError(HvdtrainError):
    """The user's own recipe raised; the cause is what, with a traceback that begins there."""


class UsageError(HvdtrainError):
    """Bad input from a person: reported as one line, without a traceback."""

    exit_code = EXIT_USAGE


class SystemLimitError(UsageError):
    """A rank may have no more files or memory; every rank that it concerns raises the same."""


class OneRankError(UsageError):
    """Bad input that this rank alone may have met: it says so itself, and ends the job."""


# Horovod's name for what its operations raise.
HorovodInternalError = HvdtrainError


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod's sign that hosts came or went. Never raised here, where the world is fixed.

    Args:
        skip_sync: for Horovod's sake; it makes no difference.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
