"""What `fit` does where ranks train together.

Keras tells no callback which other callbacks there are: that is known inside `fit` only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.horovod_api import size
from hvdtrain.core.process.exits import write_message
from hvdtrain.core.process_set import global_process_set
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.distributed import distribute, distributed_optimizers, undistribute
from hvdtrain.keras.backends.optimizer_mixin import DistributedMixin
from hvdtrain.keras.backends.types import Model
from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.keras.callbacks.rank_zero import save_schedules
from hvdtrain.keras.callbacks.synchronization import FirstBeforeSaving, FirstCallback, LastCallback


def compile_model(original: Callable[..., object], arguments: inspect.BoundArguments) -> object:
    """Compile a model, with what a DistributedOptimizer needs."""
    _adjust(arguments.arguments)
    return original(*arguments.args, **arguments.kwargs)


def adjust_compiled(model: Model) -> None:
    """Do for a compiled model what `compile_model` would have done.

    The first `model.compile(DistributedOptimizer(...))` before init() calls Keras's own `compile`:
    Python looks it up before it makes the optimizer, which hooks it.
    """
    given = getattr(model, "optimizer", None)
    optimizer = _reduce_before_scaling(given)
    if not isinstance(optimizer, DistributedMixin):
        return
    if optimizer is not given:
        model.optimizer = optimizer
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        model.jit_compile = False


def _reduce_before_scaling(optimizer: Any) -> Any:
    """Distribute a LossScaleOptimizer in place of the optimizer inside it."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not (scaled and isinstance(optimizer.inner_optimizer, DistributedMixin)):
        return optimizer
    inner = optimizer.inner_optimizer
    optimizer.inner_optimizer = undistribute(inner)
    return distribute(optimizer, inner.hvdtrain_reduction)


def _adjust(arguments: dict[str, Any]) -> None:
    optimizer, model = _reduce_before_scaling(arguments["optimizer"]), arguments["self"]
    if not isinstance(optimizer, DistributedMixin):
        return
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    half = model.dtype_policy.name == "mixed_float16"
    if half and arguments["auto_scale_loss"] and not scaled:
        inner = undistribute(optimizer)
        scaling = keras.optimizers.LossScaleOptimizer(inner, name="loss_scale_optimizer")
        optimizer = distribute(scaling, optimizer.hvdtrain_reduction)
    arguments["optimizer"] = optimizer
    if keras.backend.backend() == "tensorflow":
        _refuse_xla(arguments["jit_compile"])
        arguments["jit_compile"] = False


def _refuse_xla(jit_compile: bool | str) -> None:
    if jit_compile and jit_compile != "auto":
        raise UnsupportedError(
            "compile(jit_compile=True): XLA cannot compile a step that reduces gradients on the "
            "TensorFlow backend, because reducing calls Python: leave out jit_compile"
        )


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
