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
from hvdtrain.keras.backends.distributed import distribute, undistribute
from hvdtrain.keras.backends.optimizer_mixin import DistributedMixin
from hvdtrain.keras.tensors.types import Model


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
