"""Asynchronous reductions of PyTorch tensors, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.core import operations
from hvdtrain.core.arguments import op_on_wire
from hvdtrain.core.collectives.reducescatter import rows_of_rank
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensors.torch import (
    as_buffer,
    dtype_of,
    from_buffer,
    is_plain,
    require_tensors,
    staged,
    wire_type,
)
from hvdtrain.torch.handle import Handle
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
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([dtype_of(tensor).value for tensor in tensors], op, *factors)
    hosts, buffers, sources = [], [], []
    all_direct = True
    for tensor in tensors:
        direct = _is_direct(tensor)
        all_direct &= direct
        host = _result(tensor, in_place) if direct else staged(tensor, wire_type(tensor.dtype))
        hosts.append(host)
        buffer = as_buffer(host)
        buffers.append(buffer)
        sources.append(as_buffer(tensor) if direct and not in_place else buffer)
    submitted = operations.allreduce(
        process_set.channel(),
        buffers,
        [tensor.shape for tensor in tensors],
        wire_op,
        name,
        *factors,
        kinds,
        sources,
    )

    def finish(_: None) -> list[torch.Tensor]:
        if all_direct:
            return list(tensors) if in_place else hosts
        pairs = zip(tensors, hosts, strict=True)
        return [_returned(tensor, host, in_place) for tensor, host in pairs]

    return Handle(submitted, finish)


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
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([dtype_of(tensor).value for tensor in tensors], op, *factors)
    hosts = [staged(tensor, wire_type(tensor.dtype)) for tensor in tensors]
    submitted = operations.reducescatter(
        process_set.channel(),
        [as_buffer(host) for host in hosts],
        [tensor.shape for tensor in tensors],
        wire_op,
        name,
        *factors,
        kinds,
    )

    size, rank = process_set.size() or 1, process_set.rank() or 0

    def finish(buffers: list[Any]) -> list[torch.Tensor]:
        return [
            from_buffer(buffer)
            .reshape(rows_of_rank(tensor.shape[0], rank, size), *tensor.shape[1:])
            .to(tensor.device, tensor.dtype)
            for tensor, buffer in zip(tensors, buffers, strict=True)
        ]

    return Handle(submitted, finish)


def _is_direct(tensor: torch.Tensor) -> bool:
    """Tell whether an engine can reduce a tensor where it is."""
    return wire_type(tensor.dtype) == tensor.dtype and is_plain(tensor)


def _result(tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    if not in_place:
        return torch.empty_like(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def _returned(tensor: torch.Tensor, host: torch.Tensor, in_place: bool) -> torch.Tensor:
    if not in_place:
        return host if _is_direct(tensor) else host.to(tensor.device, tensor.dtype)
    if tensor.data_ptr() != host.data_ptr():
        with torch.no_grad():
            tensor.copy_(host)
    return tensor
