"""Asynchronous gathers, broadcasts and exchanges of PyTorch tensors, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core import operations
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensors.torch import as_buffer, from_buffer, is_plain, require_tensors, staged
from hvdtrain.torch.handle import Handle

__all__ = ["allgather_handle", "alltoall_handle", "broadcast_handle"]


def allgather_handle(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Prepare the concatenation of one tensor, or of a group, whose result is a list of tensors."""
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    require_tensors(tensors)
    hosts = [_at_least_1d(staged(tensor)) for tensor in tensors]
    shapes = [host.shape for host in hosts]
    submitted = operations.allgather(
        process_set.channel(), [as_buffer(host) for host in hosts], shapes, name
    )

    def finish(gathered: list[tuple[Buffer, list[int]]]) -> list[torch.Tensor]:
        return [
            from_buffer(buffer).reshape(sum(rows), *host.shape[1:]).to(tensor.device)
            for tensor, host, (buffer, rows) in zip(tensors, hosts, gathered, strict=True)
        ]

    return Handle(submitted, finish)


def broadcast_handle(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    """Prepare a broadcast from the world's rank `root_rank`."""
    require_tensors([tensor])
    direct = in_place and is_plain(tensor)
    host = tensor.detach() if direct else staged(tensor)
    submitted = operations.broadcast(
        process_set.channel(), as_buffer(host), tensor.shape, root_rank, name
    )

    def finish(_: None) -> torch.Tensor:
        if not in_place:
            return host.to(tensor.device)
        if not direct:
            with torch.no_grad():
                tensor.copy_(host)
        return tensor

    return Handle(submitted, finish)


def alltoall_handle(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Prepare an exchange of rows, whose result is (tensor, received splits)."""
    require_tensors([tensor])
    counts = _counts(splits)
    host = staged(tensor if counts is None or not tensor.dim() else tensor[: sum(counts)])
    submitted = operations.alltoall(
        process_set.channel(), as_buffer(host), host.shape, counts, name
    )

    def finish(result: tuple[Buffer, list[int]]) -> Any:
        buffer, received = result
        rows = from_buffer(buffer).reshape(sum(received), *tensor.shape[1:]).to(tensor.device)
        device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
        return rows, torch.tensor(received, dtype=torch.int32, device=device)

    return Handle(submitted, finish)


def _counts(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    if splits is None or len(splits) == 0:  # Horovod's two words for equal parts
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point():
            raise ValueError(f"splits must be 1-d and whole numbers, got {splits}")
        return [int(count) for count in splits.tolist()]
    return [int(count) for count in splits]


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor
