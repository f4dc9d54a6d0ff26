"""Horovod's interface for TensorFlow."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import tensorflow as tf

from hvdtrain.core import horovod_api
from hvdtrain.core.exits import install_plain_excepthook
from hvdtrain.core.horovod_api import *  # noqa: F403
from hvdtrain.core.horovod_api import gloo_built, is_homogeneous, nccl_built, on_init
from hvdtrain.errors import UsageError, require_version
from hvdtrain.tensorflow import elastic
from hvdtrain.tensorflow.allocator import register_allocator
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdtrain.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from hvdtrain.tensorflow.optimizer import DistributedOptimizer
from hvdtrain.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

# The module in which Horovod has its operations.
mpi_ops = sys.modules[__name__]

try:
    # The first version with Keras 3.
    require_version("hvdtrain.tensorflow needs TensorFlow", "tensorflow", tf.__version__, "2.16")
except UsageError:
    install_plain_excepthook()
    raise
on_init(register_allocator)


def cuda_built() -> bool:
    """Return whether TensorFlow was built with CUDA (local)."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether TensorFlow was built with ROCm (local)."""
    return bool(tf.test.is_built_with_rocm())


def __getattr__(name: str) -> Any:
    """Import the layer on first use: loading Keras for its base class takes a second."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("hvdtrain.tensorflow.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",  # noqa: F405
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "cuda_built",
    "elastic",
    "gloo_built",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "is_homogeneous",
    "join",
    "local_rank_op",
    "local_size_op",
    "nccl_built",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "size_op",
]
__all__ += horovod_api.__all__
