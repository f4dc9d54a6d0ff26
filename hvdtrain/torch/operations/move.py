"""Asynchronous gathers, broadcasts and exchanges of PyTorch tensors, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core import operations
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.handle import Handle
from hvdtrain.torch.operations.unwrapped import note_exchanged
from hvdtrain.torch.tensors.buffers import as_buffer, require_tensors
from hvdtrain.torch.tensors.routes import order, route_of

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
    note_exchanged(tensors)
    channel = channel_of(process_set)
    routes = [route_of(channel, tensor) for tensor in tensors]
    sent = [_at_least_1d(route.sent(tensor)) for route, tensor in zip(routes, tensors, strict=True)]
    submitted = operations.allgather(
        channel, [as_buffer(tensor) for tensor in sent], [tensor.shape for tensor in sent], name
    )

    def finish(gathered: list[tuple[Buffer, list[int]]]) -> list[torch.Tensor]:
        return [
            route.received(buffer, tensor).reshape(sum(rows), *tensor.shape[1:])
            for route, tensor, (buffer, rows) in zip(routes, tensors, gathered, strict=True)
        ]

    return Handle(order(submitted, routes), finish)


def broadcast_handle(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    """Prepare a broadcast from the world's rank `root_rank`."""
    require_tensors([tensor])
    channel = channel_of(process_set)
    route = route_of(channel, tensor)
    direct = in_place and route.takes(tensor)
    sent = route.own(tensor) if direct else route.copied(tensor)
    submitted = operations.broadcast(channel, as_buffer(sent), tensor.shape, root_rank, name)

    def finish(_: None) -> torch.Tensor:
        if not in_place:
            return route.returned(sent, tensor)
        if not direct:
            route.write_back(sent, tensor)
        return tensor

    return Handle(order(submitted, [route]), finish)


def alltoall_handle(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Prepare an exchange of rows, whose result is (tensor, received splits)."""
    require_tensors([tensor])
    note_exchanged([tensor])
    counts = _counts(splits)
    channel = channel_of(process_set)
    route = route_of(channel, tensor)
    sent = route.sent(tensor if counts is None or not tensor.dim() else tensor[: sum(counts)])
    submitted = operations.alltoall(channel, as_buffer(sent), sent.shape, counts, name)

    def finish(result: tuple[Buffer, list[int]]) -> Any:
        buffer, received = result
        rows = route.received(buffer, tensor).reshape(sum(received), *tensor.shape[1:])
        device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
        return rows, torch.tensor(received, dtype=torch.int32, device=device)

    return Handle(order(submitted, [route]), finish)


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
