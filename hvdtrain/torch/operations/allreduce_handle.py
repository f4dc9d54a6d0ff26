"""The reduction of a group of PyTorch tensors, on which all forms of allreduce are based."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.arguments import check_has_gradient, op_on_wire
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.divergence import note_exchanged
from hvdtrain.torch.operations.handle import Handle
from hvdtrain.torch.tensors.buffers import as_buffer, dtype_of, require_tensors
from hvdtrain.torch.tensors.routes import Route, order, route_of
from hvdtrain.types import ReduceOp

Tensors = Sequence[torch.Tensor]
# op, prescale_factor, postscale_factor, process_set
_Arguments: TypeAlias = tuple[ReduceOp, float, float, ProcessSet]


def allreduce_handle(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    """Prepare the reduction of one tensor or of a group, whose result is a list of tensors."""
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
        source, target = _source_and_target(route, tensor, op, in_place, direct)
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
        triples = zip(routes, tensors, sent, strict=True)
        return [_result(route, tensor, target, op, in_place) for route, tensor, target in triples]

    return Handle(order(submitted, routes), finish)


def _source_and_target(
    route: Route, tensor: torch.Tensor, op: ReduceOp, in_place: bool, direct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors that the engine reads and writes."""
    if not direct:
        copy = route.copied(tensor, route.wire_type(tensor.dtype, op))
        return copy, copy
    source = route.own(tensor)
    return source, source if in_place else route.empty_like(tensor)


def _result(
    route: Route, tensor: torch.Tensor, target: torch.Tensor, op: ReduceOp, in_place: bool
) -> torch.Tensor:
    """Return the user's result, given what the engine wrote."""
    direct = route.reduces(tensor, op)
    if not in_place:
        return target if direct else route.returned(target, tensor)
    if not direct:
        route.write_back(target, tensor)
    return tensor


@collective
def differentiable_allreduce(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> tuple[torch.Tensor, ...]:
    """Return the reductions of a group of tensors, differentiably."""
    arguments = (op, prescale_factor, postscale_factor, process_set)
    reduced: tuple[torch.Tensor, ...]
    reduced = _Allreduce.apply(arguments, name, *tensors)  # type: ignore[no-untyped-call]
    return reduced


@collective
def average_gradients(gradients: Tensors, process_set: ProcessSet) -> tuple[torch.Tensor, ...]:
    """Return the averages of a group of gradients, differentiably."""
    return differentiable_allreduce(gradients, ReduceOp.AVERAGE, None, 1.0, 1.0, process_set)


class _Allreduce(torch.autograd.Function):
    """Reduction of a group; its gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any, arguments: _Arguments, name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        op, prescale_factor, postscale_factor, process_set = arguments
        handle = allreduce_handle(tensors, op, name, prescale_factor, postscale_factor, process_set)
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_has_gradient("allreduce", ctx.arguments[0])
        reduced = _Allreduce.apply(ctx.arguments, None, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, *reduced)
