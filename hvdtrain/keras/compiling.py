"""What `model.compile` must do otherwise for an optimizer that reduces gradients.

Keras asks no optimizer whether XLA may compile its step, and puts a LossScaleOptimizer around it
that decides on this rank's gradients alone whether to step, so that ranks would part. Both are
settled inside of `compile`, so `compile` is where we have to be.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.wrapping import Distributed, distribute, undistributed

__all__ = ["prepare_compile"]


def prepare_compile() -> None:
    """Have `compile` of every model take a DistributedOptimizer as it must be taken."""
    owner: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    plain = owner.compile
    if hasattr(plain, "hvdtrain_prepared"):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def compile_model(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        _adjust(given.arguments)
        return plain(*given.args, **given.kwargs)

    compile_model.hvdtrain_prepared = True  # type: ignore[attr-defined]
    # Not on keras.Model: a model whose class has another `compile` than this one counts as custom.
    owner.compile = compile_model


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
