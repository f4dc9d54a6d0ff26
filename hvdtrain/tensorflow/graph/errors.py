"""Errors that are hvdtrain's and TensorFlow's at once, as scripts catch one or the other."""

from __future__ import annotations

import tensorflow as tf

from hvdtrain.errors import HvdtrainError, MismatchError, UsageError

__all__ = ["FailedPreconditionError", "InvalidArgumentError", "require_tensorflow", "translated"]

# The first whose Keras is Keras 3.
_OLDEST = (2, 16)


class FailedPreconditionError(MismatchError, tf.errors.FailedPreconditionError):
    """Ranks submitted different requests."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class InvalidArgumentError(ValueError, tf.errors.InvalidArgumentError):
    """An argument that makes no sense."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def translated(error: Exception) -> Exception:
    """Return an error of the core as the one that Horovod's operations raise in eager mode."""
    if isinstance(error, MismatchError):
        return FailedPreconditionError(str(error))
    if isinstance(error, ValueError) and not isinstance(error, HvdtrainError):
        return InvalidArgumentError(str(error))
    return error


def require_tensorflow(version: str) -> None:
    """Raise UsageError if this TensorFlow is too old."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(
            f"hvdtrain.tensorflow needs TensorFlow >= {oldest}, found {version}: "
            f"pip install 'tensorflow>={oldest}'"
        )
