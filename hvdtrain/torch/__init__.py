"""Horovod's interface for PyTorch."""

from __future__ import annotations

import sys

import torch

from hvdtrain.advice import require_version
from hvdtrain.core.context import is_initialized, shutdown
from hvdtrain.core.exits import install_plain_excepthook
from hvdtrain.core.horovod_api import (
    cross_rank,
    cross_size,
    init,
    local_rank,
    local_size,
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
from hvdtrain.torch import elastic
from hvdtrain.torch.builds import (
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
from hvdtrain.torch.compression import Compression
from hvdtrain.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdtrain.torch.operations.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from hvdtrain.torch.operations.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdtrain.torch.operations.alltoall import alltoall, alltoall_async
from hvdtrain.torch.operations.broadcast import (
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from hvdtrain.torch.operations.handle import barrier, join, poll, synchronize
from hvdtrain.torch.operations.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdtrain.torch.optimizer import DistributedOptimizer
from hvdtrain.torch.shards import backward_by_shards, own_shards
from hvdtrain.torch.sync_batch_norm import SyncBatchNorm
from hvdtrain.types import ReduceOp

# Where Horovod has its operations.
mpi_ops = sys.modules[__name__]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "backward_by_shards",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
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
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "own_shards",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

try:
    require_version("hvdtrain.torch needs PyTorch", "torch", torch.__version__, "2.4")
except UsageError:
    install_plain_excepthook()
    raise
