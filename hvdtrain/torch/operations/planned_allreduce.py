"""Reductions of one tensor, planned once for calls that differ in their data only."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.request import UNNAMED
from hvdtrain.core.arguments import op_on_wire
from hvdtrain.core.collectives.allreduce import PreparedAllreduce
from hvdtrain.core.process_set import ProcessSet, channel_of, require_process_set
from hvdtrain.torch.operations.divergence import note_exchanged_elements
from hvdtrain.torch.operations.handle import Handle, StartedHandle, allreduce_handle
from hvdtrain.torch.tensors.routes import as_buffer, dtype_of, is_plain, route_of
from hvdtrain.types import ReduceOp

# Programs that give each call another name must not fill the memory. Each plan has two keys.
_MOST_PLANS = 2048


@dataclass(slots=True)
class _Plan:
    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet
    dtype: torch.dtype
    shape: torch.Size
    channel: Channel
    prepared: PreparedAllreduce
    wire: torch.dtype | None  # in which copies are reduced; None if the tensors themselves are
    seen: weakref.ref[torch.Tensor]  # the tensor of the last call, which was plain


@collective
def run_allreduce(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    in_place: bool = False,
) -> torch.Tensor:
    """Return a reduction without gradients; the first call of a kind checks it and plans."""
    plan = _find(tensor, op, name, prescale_factor, postscale_factor, process_set)
    if plan is not None:
        data = _source_and_target(plan, tensor, in_place)
        if operations.run_prepared(plan.channel, plan.prepared, data):
            note_exchanged_elements(plan.prepared.count)
            return data[1] if plan.wire is None else _converted(data[1], tensor, in_place)
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place)
    reduced: torch.Tensor = handle.first().wait()
    if plan is None:
        _keep_plan(tensor, op, name, *factors, process_set)
    return reduced


@collective
def start_allreduce(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    in_place: bool = False,
) -> Handle:
    """Submit the reduction of a tensor, without gradients; see `run_allreduce`."""
    plan = _find(tensor, op, name, prescale_factor, postscale_factor, process_set)
    if plan is not None:
        data = _source_and_target(plan, tensor, in_place)
        operation = plan.prepared.new_operation(data)
        plan.channel.submit(operation)
        note_exchanged_elements(plan.prepared.count)
        started = StartedHandle(plan.channel, operation, data[1])
        if plan.wire is None:
            return started
        return started.then(lambda target: _converted(target, tensor, in_place))
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place).first().start()
    _keep_plan(tensor, op, name, *factors, process_set)
    return handle


def _source_and_target(
    plan: _Plan, tensor: torch.Tensor, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if plan.wire is None:
        return tensor, tensor if in_place else torch.empty_like(tensor)
    copy = tensor.to(plan.wire)
    return copy, copy


def _converted(target: torch.Tensor, tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Return a result in the type of the user's tensor."""
    return tensor.copy_(target) if in_place else target.to(tensor.dtype)


def _find(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> _Plan | None:
    if not (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and (name is None or type(name) is str)
    ):
        return None
    plans = context.current().plans
    plan: _Plan | None = plans.get(name)  # the last one of this name, usually the right one
    if plan is None:
        return None
    if (
        plan.dtype is not tensor.dtype
        or plan.op is not op
        or plan.process_set is not process_set
        or plan.shape != tensor.shape
        or plan.prescale != prescale
        or plan.postscale != postscale
    ):
        require_process_set(process_set)
        plan = plans.get((name, op, prescale, postscale, process_set, tensor.dtype, tensor.shape))
        if plan is None:
            return None
        plans[name] = plan
    # Of one tensor only shape and strides change. These checks release the GIL, which would wake
    # the channel's thread.
    if plan.seen() is not tensor:
        if not is_plain(tensor):
            return None
        plan.seen = weakref.ref(tensor)
    return plan


def _keep_plan(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> None:
    plans = context.current().plans
    if (
        len(plans) >= _MOST_PLANS
        or type(tensor) is not torch.Tensor
        or tensor.requires_grad
        or not (name is None or type(name) is str)
    ):
        return
    channel = channel_of(process_set)
    # Others are copied for the engine.
    if tensor.is_cpu and is_plain(tensor) and tensor.numel():
        wire = route_of(channel, tensor).wire_type(tensor.dtype, op)
        converts = wire is not tensor.dtype
        example = tensor.to(wire) if converts else tensor
        wire_op, (kind,) = op_on_wire([dtype_of(tensor).value], op, prescale, postscale)
        prepared = PreparedAllreduce(
            channel.communicator,
            example,
            tensor.shape,
            wire_op,
            name or f"{UNNAMED}0",
            prescale,
            postscale,
            as_buffer,
            torch.Tensor.data_ptr,
            None if name else partial(channel.name, "allreduce", None),
            kind,
        )
        rest = (op, prescale, postscale, process_set, tensor.dtype, tensor.shape)
        plans[name] = plans[(name, *rest)] = _Plan(
            *rest, channel, prepared, wire if converts else None, weakref.ref(tensor)
        )
