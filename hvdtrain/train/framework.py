"""The framework that a run asks for, which alone is imported."""

from __future__ import annotations

import importlib
import os
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.loop.protocol import Framework
from hvdtrain.train.options import BACKENDS, TrainOptions

__all__ = ["choose_framework"]

_CLASSES = {
    "torch": "torch.framework:TorchFramework",
    "tensorflow": "keras.tensorflow_framework:TensorFlowFramework",
    "keras": "keras.framework:KerasFramework",
}
_INSTALL = {
    "torch": "'hvdtrain[torch]'",
    "tensorflow": "'hvdtrain[tensorflow]'",
    "keras": "'hvdtrain[keras]'",
    "jax": "jax",
}
# What writes no checkpoint, but reads them: without it a run could not be gone on with.
_READER = "safetensors"


def choose_framework(options: TrainOptions) -> Framework:
    """Import the framework; Keras's backend is settled before Keras is imported.

    Raises:
        UsageError: it or what reads checkpoints is not installed, or KERAS_BACKEND names what
            hvdtrain does not know.
    """
    if options.framework != "torch":
        os.environ["KERAS_BACKEND"] = _keras_backend(options)
    name, _, kind = _CLASSES[options.framework].partition(":")
    try:
        importlib.import_module(options.framework)  # first, so that it is what is missed
        module: Any = importlib.import_module(f"hvdtrain.train.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _INSTALL:
            raise
        raise UsageError(f"{missing} is not installed: pip install {_INSTALL[missing]}") from error
    _require_reader()
    framework: Framework = getattr(module, kind)(options)
    return framework


def _require_reader() -> None:
    try:
        importlib.import_module(_READER)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{_READER}, which reads checkpoints, is not installed: pip install {_READER}"
        ) from error


def _keras_backend(options: TrainOptions) -> str:
    """Return what Keras is to run on; tf.keras knows TensorFlow only."""
    if options.framework == "tensorflow":
        return "tensorflow"
    backend = options.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend not in BACKENDS:
        raise UsageError(
            f"unknown KERAS_BACKEND {backend!r}: choose from {', '.join(BACKENDS)} with --backend"
        )
    return backend
