"""Asynchronous reductions of PyTorch tensors, without gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core import operations
from hvdtrain.core.arguments import op_on_wire
from hvdtrain.core.collectives.reducescatter import rows_of_rank
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.handle import Handle
from hvdtrain.torch.operations.unwrapped import note_exchanged
from hvdtrain.torch.tensors.buffers import as_buffer, dtype_of, require_tensors
from hvdtrain.torch.tensors.routes import Route, order, route_of
from hvdtrain.types import ReduceOp

__all__ = ["allreduce_handle", "reducescatter_handle"]


def allreduce_handle(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    """Prepare the reduction of one tensor, or of a group, whose result is a list of tensors."""
    require_tensors(tensors)
    note_exchanged(tensors)
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([dtype_of(tensor).value for tensor in tensors], op, *factors)
    channel = channel_of(process_set)
    routes, sent, targets, sources = [], [], [], []
    all_direct = True
    for tensor in tensors:
        route = route_of(channel, tensor)
        direct = route.reduces(tensor, op)
        all_direct &= direct
        source, target = _send(route, tensor, op, in_place, direct)
        routes.append(route)
        sent.append(target)
        targets.append(as_buffer(target))
        sources.append(targets[-1] if source is target else as_buffer(source))
    submitted = operations.allreduce(
        channel,
        targets,
        [tensor.shape for tensor in tensors],
        wire_op,
        name,
        *factors,
        kinds,
        sources,
    )

    def finish(_: None) -> list[torch.Tensor]:
        if all_direct:
            return list(tensors) if in_place else sent
        ways = zip(routes, tensors, sent, strict=True)
        return [_returned(route, tensor, target, op, in_place) for route, tensor, target in ways]

    return Handle(order(submitted, routes), finish)


def reducescatter_handle(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Prepare a reduction of which this rank keeps a part, as a list of tensors."""
    require_tensors(tensors)
    note_exchanged(tensors)
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([dtype_of(tensor).value for tensor in tensors], op, *factors)
    channel = channel_of(process_set)
    routes = [route_of(channel, tensor) for tensor in tensors]
    pairs = list(zip(routes, tensors, strict=True))
    sent = [route.sent(tensor, route.wire_type(tensor.dtype, op)) for route, tensor in pairs]
    submitted = operations.reducescatter(
        channel,
        [as_buffer(tensor) for tensor in sent],
        [tensor.shape for tensor in tensors],
        wire_op,
        name,
        *factors,
        kinds,
    )

    size, rank = process_set.size() or 1, process_set.rank() or 0

    def finish(buffers: list[Buffer]) -> list[torch.Tensor]:
        return [
            route.received(buffer, tensor).reshape(
                rows_of_rank(tensor.shape[0], rank, size), *tensor.shape[1:]
            )
            for (route, tensor), buffer in zip(pairs, buffers, strict=True)
        ]

    return Handle(order(submitted, routes), finish)


def _send(
    route: Route, tensor: torch.Tensor, op: ReduceOp, in_place: bool, direct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the engine reads, and what it writes."""
    if not direct:
        copy = route.copied(tensor, route.wire_type(tensor.dtype, op))
        return copy, copy
    source = route.own(tensor)
    return source, source if in_place else route.empty_like(tensor)


def _returned(
    route: Route, tensor: torch.Tensor, target: torch.Tensor, op: ReduceOp, in_place: bool
) -> torch.Tensor:
    direct = route.reduces(tensor, op)
    if not in_place:
        return target if direct else route.returned(target, tensor)
    if not direct:
        route.write_back(target, tensor)
    return tensor
