"""Errors that are both hvdtrain's and TensorFlow's, as scripts catch one or the other."""

from __future__ import annotations

import tensorflow as tf

from hvdtrain.errors import HvdtrainError, MismatchError, UsageError

__all__ = [
    "FailedPreconditionError",
    "InvalidArgumentError",
    "as_eager_error",
    "require_tensorflow",
]

# The first version with Keras 3.
_OLDEST = (2, 16)


class FailedPreconditionError(MismatchError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """Ranks submitted different requests."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class InvalidArgumentError(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """An argument is invalid."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def as_eager_error(error: Exception) -> Exception:
    """Return the error that Horovod's operations raise in eager mode for an error of the core."""
    if isinstance(error, MismatchError):
        return FailedPreconditionError(str(error))
    if isinstance(error, ValueError) and not isinstance(error, HvdtrainError):
        return InvalidArgumentError(str(error))
    return error


def require_tensorflow(version: str) -> None:
    """Check the version of TensorFlow.

    Raises:
        UsageError: it is too old.
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(
            f"hvdtrain.tensorflow needs TensorFlow >= {oldest}, found {version}: "
            f"pip install 'tensorflow>={oldest}'"
        )
