"""What `compile` does for an optimizer that reduces gradients.

Keras does not ask an optimizer whether XLA may compile its step, and wraps it in a
LossScaleOptimizer that looks at this rank's gradients alone to decide whether to update, so that
ranks would diverge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.distributed import DistributedMixin, distribute, undistribute

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
    if scaled and isinstance(optimizer.inner_optimizer, DistributedMixin):
        inner = optimizer.inner_optimizer
        optimizer.inner_optimizer = undistribute(inner)
        optimizer = distribute(optimizer, inner.hvdtrain_reduction)
    if not isinstance(optimizer, DistributedMixin):
        return
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
            "TensorFlow backend, because that calls Python: leave jit_compile out"
        )
