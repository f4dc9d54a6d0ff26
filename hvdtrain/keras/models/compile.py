"""What `model.compile` must do otherwise for an optimizer that reduces gradients.

Keras asks no optimizer whether XLA may compile its step, and puts a LossScaleOptimizer around it
that decides on this rank's gradients alone whether to step, so that ranks would part. Both are
settled inside of `compile`, so `compile` is where we have to be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.wrapping import Distributed, distribute, undistributed

__all__ = ["compile_model"]


def compile_model(original: Callable[..., object], arguments: inspect.BoundArguments) -> object:
    """Compile a model, with what a DistributedOptimizer needs (local).

    Args:
        original: `compile` of Keras.
        arguments: its arguments, the model included; changed in place.

    Raises:
        UnsupportedError: jit_compile=True with a DistributedOptimizer on the TensorFlow backend.
    """
    _adjust(arguments.arguments)
    return original(*arguments.args, **arguments.kwargs)


def _adjust(arguments: dict[str, Any]) -> None:
    optimizer, model = arguments["optimizer"], arguments["self"]
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled and isinstance(optimizer.inner_optimizer, Distributed):
        inner = optimizer.inner_optimizer
        optimizer.inner_optimizer = undistributed(inner)
        optimizer = distribute(optimizer, inner.hvdtrain_reduction)
    if not isinstance(optimizer, Distributed):
        return
    half = model.dtype_policy.name == "mixed_float16"
    if half and arguments["auto_scale_loss"] and not scaled:
        inner = undistributed(optimizer)
        scaling = keras.optimizers.LossScaleOptimizer(inner, name="loss_scale_optimizer")
        optimizer = distribute(scaling, optimizer.hvdtrain_reduction)
    arguments["optimizer"] = optimizer
    if keras.backend.backend() == "tensorflow":
        arguments["jit_compile"] = _without_xla(arguments["jit_compile"])


def _without_xla(jit_compile: Any) -> bool:
    if jit_compile and jit_compile != "auto":
        raise UnsupportedError(
            "compile(jit_compile=True): XLA cannot compile a step that reduces gradients on the "
            "TensorFlow backend, because that calls Python: leave jit_compile out"
        )
    return False
