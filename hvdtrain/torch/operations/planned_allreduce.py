"""Reductions of one tensor, planned once for calls that differ in their data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from hvdtrain.core import context, operations
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.request import UNNAMED
from hvdtrain.core.collectives.prepared_allreduce import PreparedAllreduce
from hvdtrain.core.process_set import ProcessSet, channel_of, require_process_set
from hvdtrain.torch.operations.allreduce_handle import allreduce_handle
from hvdtrain.torch.operations.divergence import note_exchanged_elements
from hvdtrain.torch.operations.handle import Handle
from hvdtrain.torch.tensors.buffers import as_buffer, is_plain
from hvdtrain.torch.tensors.routes import route_of
from hvdtrain.types import ReduceOp

__all__ = ["run_allreduce", "start_allreduce"]

# Programs that give each call another name must not fill the memory.
_MOST_PLANS = 1024


# Name, reduction, factors, process set, dtype and shape.
_Key: TypeAlias = tuple[str | None, ReduceOp, float, float, ProcessSet, torch.dtype, torch.Size]


@dataclass(slots=True)
class _Plan:
    channel: Channel
    prepared: PreparedAllreduce
    elements: int


def run_allreduce(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    in_place: bool = False,
) -> torch.Tensor:
    """Return the reduction of a tensor, without gradients (collective, blocking).

    The first call with these arguments and a tensor of this shape and dtype checks them and leaves
    a plan to the later ones.

    Args:
        tensor: tensor to reduce.
        op, name, prescale_factor, postscale_factor, process_set: as in `allreduce`.
        in_place: overwrite the tensor with the result.
    """
    factors = (prescale_factor, postscale_factor)
    key, plan = _look_up(tensor, op, name, *factors, process_set)
    if plan is not None:
        target = tensor if in_place else torch.empty_like(tensor)
        if operations.run_prepared(plan.channel, plan.prepared, (tensor, target)):
            note_exchanged_elements(plan.elements)
            return target
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place)
    reduced: torch.Tensor = handle.first().wait()
    if plan is None:
        _keep_plan(key, tensor)
    return reduced


def start_allreduce(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    in_place: bool = False,
) -> Handle:
    """Submit the reduction of a tensor, without gradients; see `run_allreduce` (collective).

    Args:
        tensor, op, name, prescale_factor, postscale_factor, process_set, in_place: as there.
    """
    factors = (prescale_factor, postscale_factor)
    key, plan = _look_up(tensor, op, name, *factors, process_set)
    if plan is not None:
        target = tensor if in_place else torch.empty_like(tensor)
        operation = plan.prepared.new_operation((tensor, target))
        note_exchanged_elements(plan.elements)
        return Handle(operations.Submission(plan.channel, operation), lambda _: target).start()
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place).first().start()
    _keep_plan(key, tensor)
    return handle


def _look_up(
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> tuple[_Key | None, _Plan | None]:
    """Return the key of a call, if there may be a plan for it, and the plan if there is one."""
    require_process_set(process_set)
    if (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and not tensor.requires_grad
        and (name is None or type(name) is str)
        and is_plain(tensor)
    ):
        key = (name, op, prescale, postscale, process_set, tensor.dtype, tensor.shape)
        return key, context.current().plans.get(key)
    return None, None


def _keep_plan(key: _Key | None, tensor: torch.Tensor) -> None:
    """Keep a plan for calls like one that was accepted (local)."""
    plans = context.current().plans
    if key is None or len(plans) >= _MOST_PLANS:
        return
    name, op, prescale, postscale, process_set, *_ = key
    channel = channel_of(process_set)
    # Others are copied for the engine.
    if route_of(channel, tensor).reduces(tensor, op) and tensor.numel():
        plans[key] = _plan(channel, tensor, op, name, prescale, postscale)


def _plan(
    channel: Channel,
    tensor: torch.Tensor,
    op: ReduceOp,
    name: str | None,
    prescale: float,
    postscale: float,
) -> _Plan:
    next_name = None if name else partial(channel.name, "allreduce", None)
    first = name or f"{UNNAMED}0"
    prepared = PreparedAllreduce(
        channel.communicator,
        tensor,
        tensor.shape,
        op,
        first,
        prescale,
        postscale,
        as_buffer,
        torch.Tensor.data_ptr,
        next_name,
    )
    return _Plan(channel, prepared, tensor.numel())
