"""Horovod's interface for PyTorch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.core import horovod_api
from hvdtrain.core.exits import install_plain_excepthook
from hvdtrain.core.horovod_api import *  # noqa: F403
from hvdtrain.errors import UsageError, require_version
from hvdtrain.torch.operations import watched_models as watched_models  # watches from now on

if TYPE_CHECKING:
    from hvdtrain.torch import elastic
    from hvdtrain.torch.compression import Compression
    from hvdtrain.torch.functions import (
        allgather_object,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
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
    from hvdtrain.torch.operations.gathers import (
        allgather,
        allgather_async,
        alltoall,
        alltoall_async,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        grouped_allgather,
        grouped_allgather_async,
        grouped_reducescatter,
        grouped_reducescatter_async,
        reducescatter,
        reducescatter_async,
        sparse_allreduce_async,
    )
    from hvdtrain.torch.operations.handle import barrier, join, poll, synchronize
    from hvdtrain.torch.optimizer import DistributedOptimizer
    from hvdtrain.torch.shards import backward_by_shards, own_shards
    from hvdtrain.torch.sync_batch_norm import SyncBatchNorm

# Imported when they are used: on a cluster's file system a start counts. Workers that load data
# import the program of their rank, too, and have no optimizer.
_LATER = {
    "compression": ("Compression", "compression"),
    "elastic": ("elastic",),
    "functions": (
        *("allgather_object", "broadcast_object", "broadcast_optimizer_state"),
        *("broadcast_parameters", "functions"),
    ),
    "operations.allreduce": (
        *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce"),
        *("grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
    ),
    "operations.gathers": (
        *("allgather", "allgather_async", "alltoall", "alltoall_async", "broadcast", "broadcast_"),
        *("broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async"),
        *("grouped_reducescatter", "grouped_reducescatter_async", "reducescatter"),
        *("reducescatter_async", "sparse_allreduce_async"),
    ),
    "operations.handle": ("barrier", "join", "poll", "synchronize"),
    "optimizer": ("DistributedOptimizer", "optimizer"),
    "shards": ("backward_by_shards", "own_shards"),
    "sync_batch_norm": ("SyncBatchNorm",),
}
_MODULES = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    found = globals()[name] = module if name == _MODULES[name] else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


# Where Horovod has its operations.
mpi_ops = sys.modules[__name__]


def gloo_built() -> bool:
    """Return whether torch was built with Gloo (local)."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return the version of NCCL that torch was built with, e.g. 22703, or 0 (local)."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    major, minor, patch = version[:3]
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """Return whether torch was built with CUDA (local)."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm (local)."""
    return torch.version.hip is not None


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
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
    "cuda_built",
    "elastic",
    "gloo_built",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "nccl_built",
    "own_shards",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += horovod_api.__all__

try:
    require_version("hvdtrain.torch needs PyTorch", "torch", torch.__version__, "2.4")
except UsageError:
    install_plain_excepthook()
    raise
