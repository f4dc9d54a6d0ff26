"""Operations through which gradients flow, by Horovod's conventions.

A loss is understood as the mean over ranks: what the ranks send back through an operation is
averaged, where the operation itself does not say otherwise. Gradients are differentiable again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.core import context
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.torch.operations.move import allgather_handle, alltoall_handle, broadcast_handle
from hvdtrain.torch.operations.reduce import allreduce_handle, reducescatter_handle
from hvdtrain.types import ReduceOp

__all__ = ["Allgather", "Allreduce", "Alltoall", "Broadcast", "ReduceScatter"]


class Allreduce(torch.autograd.Function):
    """Reduce a group; its gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], name: str | None, *tensors: Any) -> Any:
        ctx.arguments = arguments
        op, prescale_factor, postscale_factor, process_set = arguments
        handle = allreduce_handle(tensors, op, name, prescale_factor, postscale_factor, process_set)
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, *Allreduce.apply(ctx.arguments, None, *gradients))


class Allgather(torch.autograd.Function):
    """Gather a group; the gradient of a rank's part is the average of what ranks send back."""

    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, name: str | None, *tensors: Any) -> Any:
        ctx.process_set = process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(allgather_handle(tensors, name, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        averaged = _averaged(gradients, ctx.process_set)
        own = [torch.tensor(shape[0] if shape else 1, device="cpu") for shape in ctx.shapes]
        rows = allgather_handle(own, process_set=ctx.process_set).wait()
        rank = ctx.process_set.rank()
        parts = [
            gradient.narrow(0, int(counts[:rank].sum()), int(counts[rank])).reshape(shape)
            for gradient, counts, shape in zip(averaged, rows, ctx.shapes, strict=True)
        ]
        return (None, None, *parts)


class Broadcast(torch.autograd.Function):
    """Broadcast; the root rank's gradient is the average, the other ranks' is zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return broadcast_handle(tensor, root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (averaged,) = _averaged([gradient], ctx.process_set)
        if context.current().topology.rank != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


class Alltoall(torch.autograd.Function):
    """Exchange rows; gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.process_set, ctx.rows = process_set, tensor.shape[0]
        rows, received = alltoall_handle(tensor, splits, name, process_set).wait()
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        sent, _ = Alltoall.apply(gradient, ctx.received, None, ctx.process_set)
        rest = sent.new_zeros(ctx.rows - sent.shape[0], *sent.shape[1:])  # went nowhere
        return torch.cat([sent, rest]), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce and scatter a group; the gradients of all parts are gathered."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], name: str | None, *tensors: Any) -> Any:
        op, process_set, prescale_factor, postscale_factor = arguments
        ctx.factor = prescale_factor * postscale_factor
        if op is ReduceOp.SUM:
            ctx.factor *= process_set.size()
        ctx.process_set = process_set
        handle = reducescatter_handle(
            tensors, op, name, process_set, prescale_factor, postscale_factor
        )
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        return (None, None, *Allgather.apply(ctx.process_set, None, *scaled))


def _averaged(gradients: Sequence[torch.Tensor], process_set: ProcessSet) -> Any:
    return Allreduce.apply((ReduceOp.AVERAGE, 1.0, 1.0, process_set), None, *gradients)
