"""What `fit` must do otherwise where ranks train together.

Keras tells no optimizer how many samples a batch has, and no callback which others there are. Both
are known inside of `fit` only, so `fit` is where we have to be.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np

from hvdtrain.core.horovod_api import size
from hvdtrain.core.process_set import global_process_set
from hvdtrain.keras.backends.wrapping import optimizers_of
from hvdtrain.keras.callbacks.together import Beginning, End
from hvdtrain.keras.models.drift import warn_if_unwrapped

__all__ = ["fit_model"]


def fit_model(original: Callable[..., object], given: inspect.BoundArguments) -> object:
    """Fit a model so that all ranks end each epoch together (collective).

    Args:
        original: `fit` of Keras.
        given: its arguments, the model included; changed in place.
    """
    arguments = given.arguments
    model = arguments["self"]
    optimizers = optimizers_of(model)
    warn_if_unwrapped(model, _listed(arguments["callbacks"]))
    if optimizers:
        _weigh_steps(model)
    sets = [optimizer.hvdtrain_reduction.settings.process_set for optimizer in optimizers]
    if global_process_set in sets and size() > 1:
        arguments["callbacks"] = _surrounded(arguments["callbacks"])
    return original(*given.args, **given.kwargs)


def _surrounded(callbacks: Any) -> Any:
    """Return the callbacks with ours before and after them."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        own = callbacks.callbacks
        if not any(isinstance(callback, Beginning) for callback in own):
            given = _listed(callbacks)
            callbacks.append(End(given))
            own.insert(0, Beginning(given))
            callbacks.set_params(callbacks.params)
            callbacks.set_model(callbacks.model)
        return callbacks
    given = _listed(callbacks)
    return [Beginning(given), *given, End(given)]


def _listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Return the callbacks that `fit` is given, in whatever way."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []


def _weigh_steps(model: Any) -> None:
    """Let gradients count by the samples of their batch, in every step from now on."""
    plain = model.train_step
    if hasattr(plain, "hvdtrain_prepared"):
        return

    @functools.wraps(plain)
    def train_step(*args: Any) -> Any:
        samples = _samples(args[-1])
        with ExitStack() as block:
            for optimizer in optimizers_of(model):
                block.enter_context(optimizer.hvdtrain_reduction.weighted(samples))
            return plain(*args)

    train_step.hvdtrain_prepared = True  # type: ignore[attr-defined]
    model.train_step = train_step
    if model.train_function is not None:
        model.make_train_function(force=True)


def _samples(batch: Any) -> Any:
    """Return the first dimension of a batch: a number, or a tensor of a graph; None for none."""
    for leaf in keras.tree.flatten(batch):
        is_array = keras.ops.is_tensor(leaf) or isinstance(leaf, np.ndarray)
        if is_array and len(leaf.shape) > 0:
            samples = keras.ops.shape(leaf)[0]
            if samples is not None:
                return samples
    return None
