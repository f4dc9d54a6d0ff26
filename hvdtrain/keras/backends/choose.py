"""The module for the backend that Keras runs on."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from hvdtrain.errors import UsageError
from hvdtrain.types import ReduceOp

__all__ = ["Backend", "chosen", "require_backend", "require_keras"]

_BACKENDS = ("tensorflow", "torch", "jax")


class Backend(Protocol):
    """What is different between Keras's backends."""

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        reduction: Any,
        samples: Any,
    ) -> list[Any]:
        """Return the gradients of all ranks, none of which is None (collective).

        Args:
            gradients: this rank's.
            variables: what they are of.
            reduction: the Reduction, whose reduce_arrays() is for arrays.
            samples: what this rank counts in the average; None for 1.
        """

    def is_symbolic(self, value: Any) -> bool:
        """Return whether a value is one of a function that is being traced."""

    def allreduce(
        self, value: Any, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> Any:
        """Return the reduction of such a value (collective when it runs)."""

    def trace_again(self, model: Any) -> None:
        """Have a model traced anew, if tensors may now be sparse or not (local)."""

    def settle(self) -> None:
        """Wait until the steps that were started are done (local)."""

    def unconverted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep what compiles the user's functions from rewriting this one."""


@functools.cache  # which AutoGraph leaves alone, too
def chosen() -> Backend:
    """Return the module for the backend that Keras runs on.

    Raises:
        UsageError: hvdtrain does not know it.
    """
    name = keras.backend.backend()
    require_backend(name)
    module: Any = importlib.import_module(f"hvdtrain.keras.backends.{name}_backend")
    backend: Backend = module
    return backend


def require_backend(name: str) -> None:
    """Raise UsageError if hvdtrain does not know this backend of Keras."""
    if name not in _BACKENDS:
        raise UsageError(
            f"hvdtrain.keras works with Keras's backends {', '.join(_BACKENDS)}, found {name!r}: "
            "set KERAS_BACKEND to one of them"
        )


def require_keras(version: str) -> None:
    """Raise UsageError if this Keras is not Keras 3."""
    if int(version.partition(".")[0]) < 3:
        raise UsageError(
            f"hvdtrain.keras needs Keras >= 3, found {version}: pip install 'keras>=3'"
        )
