"""Reductions and gathers with Lightning's arguments."""

from __future__ import annotations

from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.types import ReduceOp

# Also the names of torch.distributed's operations, which ends in "ReduceOp.SUM" or "RedOpType.SUM".
_OPERATIONS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}


@collective
def reduce(tensor: Any, group: Any, operation: Any) -> Any:
    """Return a tensor reduced over the ranks, or anything else as it is."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    op = _operation(operation)
    if op is hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    return hvd.allreduce(tensor, op=op, process_set=_members(group))


@collective
def all_gather(tensor: torch.Tensor, group: Any, keep_gradients: bool) -> torch.Tensor:
    """Return the tensors of all ranks, which have equal shapes, as [size, ...]."""
    members = _members(group)
    if not keep_gradients or not tensor.requires_grad:
        return hvd.allgather(tensor.detach()[None], process_set=members)
    own = tensor[None]
    # hvdtrain, as Horovod, averages them.
    own.register_hook(lambda gradient: gradient * members.size())
    return hvd.allgather(own, process_set=members)


def _operation(operation: Any) -> ReduceOp:
    name = "mean" if operation is None else str(operation).rpartition(".")[2].lower()
    if name not in _OPERATIONS:
        raise ValueError(f"reduce_op must be one of {', '.join(_OPERATIONS)}, got {operation!r}")
    return _OPERATIONS[name]


def _members(group: Any) -> hvd.ProcessSet:
    if group is None:
        return hvd.global_process_set
    if not isinstance(group, hvd.ProcessSet):
        raise ValueError(f"group must be a ProcessSet of hvdtrain, or None, got {group!r}")
    return group
