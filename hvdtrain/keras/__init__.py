"""Horovod's interface for Keras 3, on its backends tensorflow, torch and jax."""

from __future__ import annotations

import importlib

import keras

from hvdtrain.advice import require_version
from hvdtrain.core.context import is_initialized, shutdown
from hvdtrain.core.exits import install_plain_excepthook
from hvdtrain.core.horovod_api import (
    cross_rank,
    cross_size,
    init,
    local_rank,
    local_size,
    on_init,
    rank,
    size,
)
from hvdtrain.core.process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdtrain.core.timeline_control import start_timeline, stop_timeline
from hvdtrain.errors import HorovodInternalError, UsageError
from hvdtrain.keras import callbacks, elastic
from hvdtrain.keras.backends.backend import require_backend
from hvdtrain.keras.backends.compression import Compression
from hvdtrain.keras.backends.operations import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from hvdtrain.keras.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvdtrain.keras.fitting import hook_models
from hvdtrain.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from hvdtrain.types import ReduceOp

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM

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

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
