"""All-to-all exchange of PyTorch tensors; see `allreduce` for what holds for all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core import operations
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.divergence import note_exchanged
from hvdtrain.torch.operations.handle import Handle, Tensors, Verb
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
    rows, received = ALLTOALL.run([tensor], splits, name, process_set)
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
    return _alltoall_handle([tensor], splits, name, process_set).start()


def _gradient(
    gradients: Tensors, kept: Any, splits: Splits, name: str | None, process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    """Send gradients back to the ranks that the rows came from."""
    (shape,), (received,) = kept.shapes, kept.counts
    sent, _ = ALLTOALL.run(gradients[:1], received, None, process_set)
    return [torch.cat([sent, sent.new_zeros(shape[0] - sent.shape[0], *sent.shape[1:])])]


def _alltoall_handle(
    tensors: Tensors, splits: Splits, name: str | None, process_set: ProcessSet
) -> Handle:
    require_tensors(tensors)
    note_exchanged(tensors)
    (tensor,) = tensors
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

    return Handle(channel, order(submitted, [route]).operation, finish)


ALLTOALL = Verb(_alltoall_handle, _gradient)


def _counts(splits: Splits) -> list[int] | None:
    if splits is None or len(splits) == 0:  # Horovod has both ways to ask for equal parts
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point():
            raise ValueError(f"splits must be a 1-d array of integers, got {splits}")
        return [int(count) for count in splits.tolist()]
    return [int(count) for count in splits]
