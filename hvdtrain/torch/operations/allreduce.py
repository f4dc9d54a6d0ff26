"""Allreduce of PyTorch tensors.

What holds for all operations of this folder: They are collective over the process set. A function
whose name ends in `_async` returns a handle for `poll()` and `synchronize()`, and ranks may submit
such operations in different orders; one whose name ends in `_` overwrites its input. The others
return new tensors and are differentiable. Tensors may be on any device and in any memory format.

All of them raise MismatchError where the name, shape, dtype, reduction, root rank or factors
differ between ranks, ValueError where a name is reused while its operation is in progress, and
UnsupportedError where the engine does not support the dtype.

Gradients follow Horovod's convention that the loss is the mean over ranks: a gradient that ranks
send back through an operation is averaged unless the operation itself says otherwise. Gradients
are differentiable again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.collective import collective
from hvdtrain.core.arguments import choose_op
from hvdtrain.core.compression import Compressor
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.torch.compression import Compression
from hvdtrain.torch.operations.handle import (
    Handle,
    allreduce_handle,
    differentiable_allreduce,
    needs_gradient,
)
from hvdtrain.torch.operations.planned_allreduce import run_allreduce, start_allreduce
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.types import ReduceOp

Tensors = Sequence[torch.Tensor]


@disable_compile
@collective
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


@disable_compile
@collective
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return postscale_factor * op over ranks of (prescale_factor * tensor_r).

    Args:
        tensor: tensor of any shape; shape and dtype are equal on all ranks.
        average: deprecated; True is op=Average, False is op=Sum.
        name: name of the operation, by which ranks match their calls and which messages show;
            operations without one are numbered.
        compression: how the tensor is rounded before the reduction.
        op: Average (the default; integers are truncated toward zero), Sum, Min, Max, Product or
            Adasum.
        prescale_factor: factor applied before the reduction.
        postscale_factor: factor applied after it.
        process_set: ranks that take part.

    Returns:
        A tensor of the input's shape, dtype and device.
    """
    op = choose_op(op, average)
    usual = not getattr(tensor, "requires_grad", True)
    if compression is Compression.none and (usual or not needs_gradient((tensor,))):
        return run_allreduce(tensor, op, name, prescale_factor, postscale_factor, process_set)
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], None, name, compression, op, *factors, process_set)[0]


@disable_compile
@collective
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `allreduce`, without gradients.

    Args:
        tensor: tensor to reduce; must not change before the operation is complete.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    op = choose_op(op, average)
    return start_allreduce(tensor, op, name, prescale_factor, postscale_factor, process_set)


@disable_compile
@collective
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `allreduce_`.

    Args:
        tensor: tensor to reduce in place.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    op = choose_op(op, average)
    return start_allreduce(tensor, op, name, prescale_factor, postscale_factor, process_set, True)


@disable_compile
@collective
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with its reduction and return it.

    Args:
        tensor: tensor to reduce in place.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    op = choose_op(op, average)
    return run_allreduce(tensor, op, name, prescale_factor, postscale_factor, process_set, True)
