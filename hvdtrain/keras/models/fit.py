"""What `fit` does where ranks train together.

Keras tells no optimizer how many samples a batch has, and no callback which other callbacks there
are. Both are known inside `fit` only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import keras
import numpy as np

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
from hvdtrain.keras.models.drift import warn_if_unwrapped
from hvdtrain.keras.tensors.types import Model, Tensor

__all__ = ["fit_model", "weight_steps"]

# What `fit` takes as callbacks.
Callbacks: TypeAlias = keras.callbacks.CallbackList | Sequence[keras.callbacks.Callback] | None


def fit_model(original: Callable[..., object], arguments: inspect.BoundArguments) -> object:
    """Fit a model so that all ranks end each epoch together (collective).

    Args:
        original: `fit` of Keras.
        arguments: its arguments, the model included; changed in place.
    """
    given = arguments.arguments
    model: Model = given["self"]
    adjust_compiled(model)
    optimizers = distributed_optimizers(model)
    warn_if_unwrapped(model, _as_list(given["callbacks"]))
    if optimizers:
        weight_steps(model)
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


def _sample_count(batch: Any) -> Tensor | int | None:
    """Return the first dimension of a batch, a tensor while it is traced; None if it has none."""
    for leaf in keras.tree.flatten(batch):
        is_array = keras.ops.is_tensor(leaf) or isinstance(leaf, np.ndarray)
        if is_array and len(leaf.shape) > 0:
            samples: Tensor | int | None = keras.ops.shape(leaf)[0]
            if samples is not None:
                return samples
    return None


def weight_steps(model: Model, count: Callable[[Any], Tensor | int | None] = _sample_count) -> None:
    """Weight each step by the samples of its batch, also in later fits (local).

    A second call does nothing.

    Args:
        model: compiled model.
        count: returns the number of samples of a batch, a tensor while it is traced.
    """
    original = model.train_step
    if hasattr(original, "hvdtrain_hooked"):
        return

    @functools.wraps(original)
    def train_step(*args: Any) -> object:
        samples = count(args[-1])
        with ExitStack() as stack:
            for optimizer in distributed_optimizers(model):
                stack.enter_context(optimizer.hvdtrain_reduction.weighted(samples))
            return original(*args)

    train_step.hvdtrain_hooked = True  # type: ignore[attr-defined]
    model.train_step = train_step
    if model.train_function is not None:
        model.make_train_function(force=True)
