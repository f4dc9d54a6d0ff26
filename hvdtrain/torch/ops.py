"""Operations on PyTorch tensors. All of them are collective and blocking."""

from __future__ import annotations

import torch

from hvdtrain.core import operations
from hvdtrain.tensors.torch import as_buffer, from_buffer, staged
from hvdtrain.types import ReduceOp

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_"]


def allreduce(
    tensor: torch.Tensor, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE
) -> torch.Tensor:
    """Return the reduction of all ranks' tensors; the input stays as it is.

    Args:
        tensor: of equal shape and type on all ranks, on any device.
        name: shown in messages; must be equal on all ranks.
        op: Average (for integers truncated towards zero) or Sum.

    Raises:
        MismatchError: shape, type, op or name differ between ranks.
        UnsupportedError: the engine does not reduce this type.
    """
    host = staged(tensor)
    operations.allreduce(as_buffer(host), tensor.shape, op, name)
    return host.to(tensor.device)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension by rank.

    Args:
        tensor: only the first dimension may differ between ranks; a 0-d tensor counts as one
            element.
        name: shown in messages; must be equal on all ranks.

    Raises:
        MismatchError: type, name or the other dimensions differ between ranks.
    """
    host = staged(tensor)
    if host.dim() == 0:
        host = host.reshape(1)
    buffer, rows = operations.allgather(as_buffer(host), host.shape, name)
    gathered = from_buffer(buffer).reshape(sum(rows), *host.shape[1:])
    return gathered.to(tensor.device)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return rank `root_rank`'s tensor on every rank; the input stays as it is.

    Raises:
        ValueError: there is no such rank.
        MismatchError: shape, type, root_rank or name differ between ranks.
    """
    host = staged(tensor)
    operations.broadcast(as_buffer(host), tensor.shape, root_rank, name)
    return host.to(tensor.device)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite every rank's tensor with rank `root_rank`'s, and return it; see `broadcast`."""
    with torch.no_grad():
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            operations.broadcast(as_buffer(tensor), tensor.shape, root_rank, name)
        else:
            tensor.copy_(broadcast(tensor, root_rank, name))
    return tensor
