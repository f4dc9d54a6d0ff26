"""Horovod's interface for TensorFlow."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import tensorflow as tf

from hvdtrain.advice import require_version
from hvdtrain.core.context import is_initialized, shutdown
from hvdtrain.core.exits import install_plain_excepthook
from hvdtrain.core.horovod_api import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
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
from hvdtrain.tensorflow import elastic
from hvdtrain.tensorflow.allocator import register_allocator
from hvdtrain.tensorflow.builds import (
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
from hvdtrain.tensorflow.operations.ops import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    join,
)
from hvdtrain.tensorflow.operations.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvdtrain.tensorflow.optimizer import DistributedOptimizer
from hvdtrain.tensorflow.rank_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvdtrain.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdtrain.types import ReduceOp

# The module in which Horovod has its operations.
mpi_ops = sys.modules[__name__]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM

try:
    # The first version with Keras 3.
    require_version("hvdtrain.tensorflow needs TensorFlow", "tensorflow", tf.__version__, "2.16")
except UsageError:
    install_plain_excepthook()
    raise
on_init(register_allocator)


def __getattr__(name: str) -> Any:
    """Import the layer on first use: loading Keras for its base class takes a second."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("hvdtrain.tensorflow.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
