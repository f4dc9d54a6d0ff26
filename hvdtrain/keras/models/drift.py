"""Warnings of models whose ranks do less together than the script asks for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import keras

from hvdtrain.core import context
from hvdtrain.core.process.exits import write_message
from hvdtrain.keras.backends.distributed import distributed_optimizers
from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.keras.tensors.types import Model


def warn_if_unwrapped(model: Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Warn once, on rank 0, that each rank trains a model of its own.

    That is certain only if ranks start from the same weights, and if the step, the optimizer and
    the callbacks are those of Keras or hvdtrain, so that none can average gradients or weights.
    """
    if not context.is_initialized() or context.current().topology.size == 1:
        return
    starts_equal = any(isinstance(c, BroadcastGlobalVariablesCallback) for c in callbacks)
    if starts_equal and not distributed_optimizers(model) and _runs_keras_only(model, callbacks):
        _warn()


def warn_if_unsynchronized(model: Model) -> None:
    """Warn once, on rank 0, of Keras layers that synchronize under tf.distribute only."""
    if not context.is_initialized() or context.current().topology.size == 1:
        return
    for layer in model._flatten_layers():
        if _is_from_keras(layer) and getattr(layer, "synchronized", False):
            _warn_of_layers()


def _runs_keras_only(model: Model, callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    if not all(_is_without_user_code(callback) for callback in callbacks):
        return False
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own_step = type(model).train_step is keras.Model.train_step and "train_step" not in vars(model)
    frozen = model.built and not model.trainable_variables
    return own_step and not frozen and _is_from_keras(optimizer) and _is_from_keras(inner)


def _is_without_user_code(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return False
    return _is_from_keras(callback) or type(callback).__module__.startswith("hvdtrain.")


def _is_from_keras(instance: object) -> bool:
    """Return whether the class of an object is in Keras; a subclass elsewhere is not."""
    return type(instance).__module__.startswith("keras.src.")


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


@functools.cache
def _warn_of_layers() -> None:
    topology = context.current().topology
    if topology.rank == 0:
        write_message(
            topology.title,
            "fit: BatchNormalization(synchronized=True) uses each rank's own batch, because it "
            "synchronizes replicas of tf.distribute only: use "
            "hvdtrain.tensorflow.SyncBatchNormalization()",
        )
