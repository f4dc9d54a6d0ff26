"""What `fit` does where ranks train together.

Keras tells no callback which other callbacks there are: that is known inside `fit` only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras

from hvdtrain.collective import collective
from hvdtrain.core.horovod_api import size
from hvdtrain.core.process_set import global_process_set
from hvdtrain.keras.backends.distributed import distributed_optimizers
from hvdtrain.keras.callbacks.saving import save_schedules
from hvdtrain.keras.callbacks.synchronization import (
    FirstBeforeSaving,
    FirstCallback,
    LastCallback,
)
from hvdtrain.keras.models.compile import adjust_compiled
from hvdtrain.keras.models.drift import warn_if_unsynchronized, warn_if_unwrapped
from hvdtrain.keras.tensors.types import Model

# What `fit` takes as callbacks.
Callbacks: TypeAlias = keras.callbacks.CallbackList | Sequence[keras.callbacks.Callback] | None


@collective
def fit_model(original: Callable[..., object], arguments: inspect.BoundArguments) -> object:
    """Fit a model so that all ranks end each epoch together."""
    given = arguments.arguments
    model: Model = given["self"]
    adjust_compiled(model)
    optimizers = distributed_optimizers(model)
    warn_if_unwrapped(model, _as_list(given["callbacks"]))
    if optimizers:
        warn_if_unsynchronized(model)
    sets = [optimizer.hvdtrain_reduction.settings.process_set for optimizer in optimizers]
    if global_process_set in sets and size() > 1:
        given["callbacks"] = _with_synchronization(given["callbacks"])
    return original(*arguments.args, **arguments.kwargs)


def _with_synchronization(callbacks: Callbacks) -> Callbacks:
    """Return the user's callbacks between those that keep ranks together."""
    own = _as_list(callbacks)
    first = FirstBeforeSaving if save_schedules(own) else FirstCallback
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [first(own), *own, LastCallback(own)]
    if not any(isinstance(callback, FirstCallback) for callback in own):
        callbacks.append(LastCallback(own))
        callbacks.callbacks.insert(0, first(own))
        callbacks.set_params(callbacks.params)
        callbacks.set_model(callbacks.model)
    return callbacks


def _as_list(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return the callbacks that `fit` is given, in whatever structure."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []
