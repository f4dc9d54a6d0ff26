"""All-to-all exchange of PyTorch tensors; see `allreduce` for what holds for all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core import operations
from hvdtrain.core.process_set import (
    ProcessSet,
    channel_of,
    global_process_set,
    require_process_set,
)
from hvdtrain.torch.operations.divergence import note_exchanged
from hvdtrain.torch.operations.handle import Handle, needs_gradient
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.routes import as_buffer, order, require_tensors, route_of

Splits = torch.Tensor | Sequence[int] | None


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor: ...


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@disable_compile
def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send part r of the first dimension to rank r and return what was received, in rank order.

    Args:
        tensor: tensor of shape [rows, ...]; dtype and dimensions after the first are equal on all
            ranks.
        splits: [size] integers, the number of rows for each rank; rows beyond their sum are not
            sent. Without them every rank gets the same number.
        name: name of the operation.
        process_set: ranks that take part.

    Returns:
        The rows received, and with `splits` also the number of rows from each rank ([size] int32).

    Raises:
        ValueError: the splits sum to more than the first dimension, or, without splits, the first
            dimension is not divisible by the number of ranks.
    """
    if needs_gradient([tensor]):
        given = splits if splits is not None else _even_splits(tensor, process_set)
        arguments = (tensor, given, name, process_set)
        rows, received = _Alltoall.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        rows, received = _alltoall_handle(tensor, splits, name, process_set).wait()
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    result = rows if splits is None else (rows, received)
    return result


@disable_compile
def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `alltoall`, without gradients; the result is always (tensor, received splits).

    Args:
        tensor: tensor to send; must not change before the operation is complete.
        splits, name, process_set: as in `alltoall`.
    """
    return _alltoall_handle(tensor, splits, name, process_set).start()


class _Alltoall(torch.autograd.Function):
    """Exchange of rows; gradients go back to the ranks that the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.process_set, ctx.rows = process_set, tensor.shape[0]
        rows, received = _alltoall_handle(tensor, splits, name, process_set).wait()
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        arguments = (gradient, ctx.received, None, ctx.process_set)
        sent, _ = _Alltoall.apply(*arguments)  # type: ignore[no-untyped-call]
        unsent = sent.new_zeros(ctx.rows - sent.shape[0], *sent.shape[1:])
        return torch.cat([sent, unsent]), None, None, None


def _alltoall_handle(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
) -> Handle:
    require_tensors([tensor])
    note_exchanged([tensor])
    counts = _counts(splits)
    channel = channel_of(process_set)
    route = route_of(channel, tensor)
    sent = route.sent(tensor if counts is None or not tensor.dim() else tensor[: sum(counts)])
    submitted = operations.alltoall(channel, as_buffer(sent), sent.shape, counts, name)

    def finish(result: tuple[Buffer, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        buffer, received = result
        rows = route.received(buffer, tensor).reshape(sum(received), *tensor.shape[1:])
        device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
        return rows, torch.tensor(received, dtype=torch.int32, device=device)

    return Handle(order(submitted, [route]), finish)


def _counts(splits: Splits) -> list[int] | None:
    if splits is None or len(splits) == 0:  # Horovod has both ways to ask for equal parts
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point():
            raise ValueError(f"splits must be a 1-d array of integers, got {splits}")
        return [int(count) for count in splits.tolist()]
    return [int(count) for count in splits]


def _even_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int]:
    size = require_process_set(process_set).size() or 1
    return [tensor.shape[0] // size] * size
