"""Allreduce of groups of PyTorch tensors, each group as one operation; see allreduce.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.core.arguments import choose_op
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.torch.operations.allreduce_handle import allreduce_handle, differentiable_allreduce
from hvdtrain.torch.operations.compression import Compression, Compressor
from hvdtrain.torch.operations.handle import Handle, needs_gradient
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.types import ReduceOp

__all__ = [
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]

Tensors = Sequence[torch.Tensor]


@disable_compile
def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors as one operation.

    Args:
        tensors: tensors to reduce; their number is equal on all ranks.
        average, name, compression, op, prescale_factor, postscale_factor, process_set: as in
            `allreduce`.
    """
    op = choose_op(op, average)
    pairs = [compression.compress(tensor) for tensor in tensors]
    inputs = [tensor for tensor, _ in pairs]
    factors = (prescale_factor, postscale_factor)
    if needs_gradient(inputs):
        outputs = differentiable_allreduce(inputs, op, name, *factors, process_set)
    else:
        outputs = allreduce_handle(inputs, op, name, *factors, process_set).wait()
    contexts = [context for _, context in pairs]
    return [
        compression.decompress(output, context)
        for output, context in zip(outputs, contexts, strict=True)
    ]


@disable_compile
def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `grouped_allreduce`, without gradients.

    Args:
        tensors: tensors to reduce; must not change before the operation is complete.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return allreduce_handle(list(tensors), op, name, *factors, process_set).then(tuple).start()


@disable_compile
def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `grouped_allreduce_`.

    Args:
        tensors: tensors to reduce in place.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle(list(tensors), op, name, *factors, process_set, in_place=True)
    return handle.then(tuple).start()


@disable_compile
def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Overwrite several tensors with their reductions as one operation and return them.

    Args:
        tensors: tensors to reduce in place.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle(list(tensors), op, name, *factors, process_set, in_place=True)
    return tuple(handle.wait())
