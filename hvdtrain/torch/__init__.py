"""Horovod's interface for PyTorch."""

from __future__ import annotations

from hvdtrain.core.context import init, is_initialized, shutdown
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.core.operations import barrier
from hvdtrain.core.place import (
    cross_rank,
    cross_size,
    local_rank,
    local_size,
    rank,
    size,
)
from hvdtrain.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdtrain.torch.ops import allgather, allreduce, broadcast, broadcast_
from hvdtrain.torch.optimizer import DistributedOptimizer
from hvdtrain.types import ReduceOp

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
