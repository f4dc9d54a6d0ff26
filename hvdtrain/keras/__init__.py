"""Horovod's interface for Keras 3, on its backends tensorflow, torch and jax."""

from __future__ import annotations

import importlib

import keras

from hvdtrain.core import horovod_api
from hvdtrain.core.exits import install_plain_excepthook
from hvdtrain.core.horovod_api import *  # noqa: F403
from hvdtrain.core.horovod_api import gloo_built, nccl_built, on_init
from hvdtrain.errors import UsageError, require_version
from hvdtrain.keras import callbacks, elastic
from hvdtrain.keras.backends.distributed import require_backend
from hvdtrain.keras.backends.operations import (
    Compression,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from hvdtrain.keras.fitting import hook_models
from hvdtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model

try:
    require_version("hvdtrain.keras needs Keras", "keras", keras.__version__, "3")
    require_backend(keras.backend.backend())
    if keras.backend.backend() == "jax":
        jax_version = importlib.import_module("jax").__version__
        # Its buffer_callback is needed.
        require_version("hvdtrain.keras needs JAX", "jax", jax_version, "0.6.1")
except UsageError:
    install_plain_excepthook()
    raise
# Importing this module leaves Keras as it is. The first DistributedOptimizer would be too late for
# all hooks: in `model.compile(hvd.DistributedOptimizer(...))` Python looks up `compile` before it
# makes the optimizer, and a `fit` whose optimizer nobody wrapped needs one that warns.
on_init(hook_models)
if keras.backend.backend() == "tensorflow":
    importlib.import_module("hvdtrain.tensorflow")  # its allocator is for the first tensor already


def cuda_built() -> bool:
    """Return whether gradients are reduced on CUDA devices: they go through host memory (local)."""
    return False


def rocm_built() -> bool:
    """Return whether gradients are reduced on ROCm devices: they go through host memory (local)."""
    return False


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "cuda_built",
    "elastic",
    "gloo_built",
    "load_model",
    "nccl_built",
    "reducescatter",
    "rocm_built",
]
__all__ += horovod_api.__all__
