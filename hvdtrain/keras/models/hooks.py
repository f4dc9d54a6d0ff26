"""What `compile`, `fit` and `save` of Keras do in addition once hvdtrain is in use.

Keras asks no optimizer whether XLA may compile its step or how its loss is scaled, tells none how
many samples a batch has, and shows no callback the others. All that is known inside `compile` and
`fit` only, so they are where hvdtrain has to be. Saving asks no optimizer whether weights are those
of one rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.core import context
from hvdtrain.keras.backends.distributed import distributed_optimizers
from hvdtrain.keras.models.fit import compile_model, fit_model
from hvdtrain.keras.models.weighing import hook_losses, make_weighing_step


def save_model(original: Callable[..., object], arguments: inspect.BoundArguments) -> object:
    """Save a model if it is not one of this rank alone.

    A rank that saves by itself cannot ask others for an exchange: they may not take part.
    """
    optimizers = distributed_optimizers(arguments.arguments["self"])
    if not all(optimizer.synchronized for optimizer in optimizers):
        raise RuntimeError(
            f"{context.current().topology.title} save: the ranks' weights differ until their next "
            "exchange: call optimizer.flush() on all ranks before, or save at the end of an epoch; "
            "in fit give keras.callbacks.ModelCheckpoint(..., save_freq=batches) or "
            "BackupAndRestore, which hvdtrain knows on all ranks"
        )
    return original(*arguments.args, **arguments.kwargs)


def hook_models() -> None:
    """Hook methods of every Keras model. A second call does nothing."""
    _hook("compile", compile_model)
    _hook("fit", fit_model)
    _hook("make_train_function", make_weighing_step)
    hook_losses()
    _hook("save", save_model)
    _hook("save_weights", save_model)


def _hook(
    method: str, replacement: Callable[[Callable[..., object], inspect.BoundArguments], object]
) -> None:
    """Replace a method of every model."""
    owner: Any = next(kind for kind in keras.Model.__mro__ if method in vars(kind))
    original = getattr(owner, method)
    if hasattr(original, "hvdtrain_hooked"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> object:
        try:
            arguments = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{method}() {error}") from None
        arguments.apply_defaults()
        return replacement(original, arguments)

    hooked.hvdtrain_hooked = True  # type: ignore[attr-defined]
    # Not on keras.Model: a model whose class has another `compile` than this one counts as custom.
    setattr(owner, method, hooked)
