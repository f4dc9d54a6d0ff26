"""A warning for a `fit` whose replicas drift apart, because its optimizer is not wrapped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.core import context
from hvdtrain.core.process.exits import write_message
from hvdtrain.keras.backends.wrapping import optimizers_of
from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback

__all__ = ["warn_if_unwrapped"]


def warn_if_unwrapped(model: Any, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Say on rank 0, once, that each rank trains a model of its own (local).

    Only where it is certain: ranks start from the same weights, and the step, the optimizer and the
    callbacks are Keras's own or ours, so that nothing in them can average gradients or weights.

    Args:
        model: which is about to be fitted.
        callbacks: of this fit.
    """
    if not context.is_initialized() or context.current().topology.size == 1:
        return
    starts_equal = any(isinstance(c, BroadcastGlobalVariablesCallback) for c in callbacks)
    if starts_equal and not optimizers_of(model) and _trains_by_keras_alone(model, callbacks):
        _warn()


def _trains_by_keras_alone(model: Any, callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    if not all(_runs_no_code_of_the_user(callback) for callback in callbacks):
        return False
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own_step = type(model).train_step is keras.Model.train_step and "train_step" not in vars(model)
    frozen = model.built and not model.trainable_variables
    return own_step and not frozen and _is_of_keras(optimizer) and _is_of_keras(inner)


def _runs_no_code_of_the_user(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return False
    return _is_of_keras(callback) or type(callback).__module__.startswith("hvdtrain.")


def _is_of_keras(thing: Any) -> bool:
    """Return whether it is of a class of Keras, and not of one derived from it elsewhere."""
    return type(thing).__module__.startswith("keras.src.")


@functools.cache
def _warn() -> None:
    topology = context.current().topology
    if topology.rank == 0:
        write_message(
            topology.title,
            "fit: BroadcastGlobalVariablesCallback, but the optimizer is not wrapped, so that each "
            "rank trains a model of its own and they drift apart: "
            "compile(hvd.DistributedOptimizer(optimizer), ...) with an optimizer such as "
            "keras.optimizers.Adam()",
        )
