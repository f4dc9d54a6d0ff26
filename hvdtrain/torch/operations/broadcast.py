"""Broadcast of PyTorch tensors; see `allreduce` for what holds for all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.allreduce import ALLREDUCE
from hvdtrain.torch.operations.handle import Handle, Tensors, Verb
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.routes import as_buffer, order, require_tensors, route_of
from hvdtrain.types import ReduceOp


@disable_compile
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of rank `root_rank` on every rank.

    Args:
        tensor: tensor of any shape; shape and dtype are equal on all ranks.
        root_rank: rank in the world, also with a process set.
        name: name of the operation.
        process_set: ranks that take part.

    Raises:
        ValueError: `root_rank` is not in the process set.
    """
    return BROADCAST.run([tensor], root_rank, name, process_set)[0]


@disable_compile
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `broadcast`, without gradients.

    Args:
        tensor: tensor to send; must not change before the operation is complete.
        root_rank, name, process_set: as in `broadcast`.
    """
    return _broadcast_handle([tensor], root_rank, name, process_set).first().start()


@disable_compile
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `broadcast_`.

    Args:
        tensor: tensor to overwrite.
        root_rank, name, process_set: as in `broadcast`.
    """
    handle = _broadcast_handle([tensor], root_rank, name, process_set, in_place=True)
    return handle.first().start()


@disable_compile
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor of every rank with that of rank `root_rank` and return it.

    Args:
        tensor: tensor to overwrite.
        root_rank, name, process_set: as in `broadcast`.
    """
    handle = _broadcast_handle([tensor], root_rank, name, process_set, in_place=True)
    output: torch.Tensor = handle.run()[0]
    return output


@collective
def _gradient(
    gradients: Tensors, _: Any, root_rank: int, name: str | None, process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    """Return the average over ranks on the root rank, and zero on the others."""
    arguments = (ReduceOp.AVERAGE, None, 1.0, 1.0, process_set)
    (averaged,) = ALLREDUCE.run(gradients, *arguments)
    if context.current().topology.rank != root_rank:
        # Part of the graph, so that all ranks reduce when this is differentiated again.
        averaged = averaged.masked_fill(torch.ones_like(averaged, dtype=torch.bool), 0)
    return [averaged]


def _broadcast_handle(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    require_tensors(tensors)
    (tensor,) = tensors
    channel = channel_of(process_set)
    route = route_of(channel, tensor)
    direct = in_place and route.takes(tensor)
    sent = route.own(tensor) if direct else route.copied(tensor)
    submitted = operations.broadcast(channel, as_buffer(sent), tensor.shape, root_rank, name)

    def finish(_: None) -> list[torch.Tensor]:
        if not in_place:
            return [route.returned(sent, tensor)]
        if not direct:
            route.write_back(sent, tensor)
        return [tensor]

    return Handle(channel, order(submitted, [route]).operation, finish)


BROADCAST = Verb(_broadcast_handle, _gradient)
