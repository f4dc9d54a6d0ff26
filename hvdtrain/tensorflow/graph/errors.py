"""Errors that are both hvdtrain's and TensorFlow's, as scripts catch one or the other."""

from __future__ import annotations

import tensorflow as tf

from hvdtrain.errors import HvdtrainError, MismatchError


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
