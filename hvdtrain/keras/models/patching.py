"""Methods of Keras's models that must do more than Keras has them do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

__all__ = ["extend"]

# Takes the model's method, and the arguments of a call; defaults are filled in.
Around = Callable[[Callable[..., Any], inspect.BoundArguments], Any]


def extend(method: str, around: Around) -> None:
    """Have `around` called instead of a method of every model (local; a second time does nothing).

    Args:
        method: its name.
        around: calls the method.
    """
    owner: Any = next(kind for kind in keras.Model.__mro__ if method in vars(kind))
    plain = getattr(owner, method)
    if hasattr(plain, "hvdtrain_prepared"):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def extended(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{method}() {error}") from None
        given.apply_defaults()
        return around(plain, given)

    extended.hvdtrain_prepared = True  # type: ignore[attr-defined]
    # Not on keras.Model: a model whose class has another `compile` than this one counts as custom.
    setattr(owner, method, extended)
