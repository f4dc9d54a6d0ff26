"""Operations on PyTorch tensors, as Horovod has them.

All are collective over the process set. A function whose name ends in `_async` returns a handle
for `poll()` and `synchronize()`, and ranks may submit such operations in different orders; one
whose name ends in `_` overwrites its input. The others return new tensors, and gradients flow
through them. Tensors may lie on any device, in any memory order. A `name` shows in messages and is
how ranks find one another's operations; without one they are numbered.

Errors of all of them: MismatchError where name, shape, type, reduction, root or factors differ
between ranks; ValueError where a name is used while it is under way; UnsupportedError where the
engine does not take the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.core import operations
from hvdtrain.core.arguments import choose_op
from hvdtrain.core.process_set import (
    ProcessSet,
    channel_of,
    global_process_set,
    require_process_set,
)
from hvdtrain.torch.operations import autograd
from hvdtrain.torch.operations.compression import Compression, Compressor
from hvdtrain.torch.operations.handle import Handle, poll, synchronize
from hvdtrain.torch.operations.move import allgather_handle, alltoall_handle, broadcast_handle
from hvdtrain.torch.operations.reduce import allreduce_handle, reducescatter_handle
from hvdtrain.torch.tensors.buffers import require_tensors
from hvdtrain.torch.tensors.compiling import uncompiled
from hvdtrain.types import ReduceOp

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Tensors = Sequence[torch.Tensor]


def _needs_gradient(tensors: Tensors) -> bool:
    require_tensors(tensors)
    return any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled()


@uncompiled
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
    """Return postscale * op over ranks of (prescale * tensor_r).

    Args:
        tensor: of equal shape and type on all ranks.
        average: deprecated; True is op=Average, False op=Sum.
        name: of the operation.
        compression: how the tensor is rounded before.
        op: Average (the default; for integers truncated towards zero), Sum, Min, Max, Product
            or Adasum.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after it.
        process_set: the ranks that take part.
    """
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    if compression is Compression.none and not _needs_gradient((tensor,)):
        reduced: torch.Tensor = allreduce_handle([tensor], op, name, *factors, process_set).wait()[
            0
        ]
        return reduced
    return grouped_allreduce([tensor], None, name, compression, op, *factors, process_set)[0]


@uncompiled
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `allreduce`; no gradient flows through it."""
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return allreduce_handle([tensor], op, name, *factors, process_set).first().start()


@uncompiled
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `allreduce_`."""
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place=True)
    return handle.first().start()


@uncompiled
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor with its reduction and return it; see `allreduce`."""
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place=True)
    reduced: torch.Tensor = handle.first().wait()
    return reduced


@uncompiled
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
    """Return the reductions of several tensors as one operation; see `allreduce`."""
    op = choose_op(op, average)
    pairs = [compression.compress(tensor) for tensor in tensors]
    inputs = [tensor for tensor, _ in pairs]
    if _needs_gradient(inputs):
        arguments = (op, prescale_factor, postscale_factor, process_set)
        outputs = autograd.Allreduce.apply(arguments, name, *inputs)
    else:
        factors = (prescale_factor, postscale_factor)
        outputs = allreduce_handle(inputs, op, name, *factors, process_set).wait()
    contexts = [context for _, context in pairs]
    return [
        compression.decompress(output, context)
        for output, context in zip(outputs, contexts, strict=True)
    ]


@uncompiled
def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `grouped_allreduce`; no gradient flows through it."""
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    return allreduce_handle(list(tensors), op, name, *factors, process_set).then(tuple).start()


@uncompiled
def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `grouped_allreduce_`."""
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle(list(tensors), op, name, *factors, process_set, in_place=True)
    return handle.then(tuple).start()


@uncompiled
def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Overwrite several tensors with their reductions as one operation; see `allreduce`."""
    op = choose_op(op, average)
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle(list(tensors), op, name, *factors, process_set, in_place=True)
    return tuple(handle.wait())


@uncompiled
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit the Sum or Average of sparse tensors, by gathering their elements.

    Calling the handle, too, returns the sparse result, which is not coalesced.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"sparse tensors are reduced by Average or Sum, got {op}")
    # Elements are rows of [indices, value], so indices travel with the element first.
    indices = tensor._indices().t()
    handle = allgather_handle([indices, tensor._values()], name, process_set)
    size = process_set.size() or 1

    def finish(gathered: list[torch.Tensor]) -> torch.Tensor:
        places, values = gathered
        if op is ReduceOp.AVERAGE:
            values = values / size
        # On a GPU the check would have the host wait for it.
        check = tensor.is_cpu
        return torch.sparse_coo_tensor(
            places.t(), values, tensor.shape, device=values.device, check_invariants=check
        )

    return handle.then(finish).start()


@uncompiled
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension by rank.

    Args:
        tensor: only the first dimension may differ between ranks; a 0-d tensor counts as one
            element.
        name: of the operation.
        process_set: the ranks that take part.
    """
    return grouped_allgather([tensor], name, process_set)[0]


@uncompiled
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Submit `allgather`; no gradient flows through it."""
    return allgather_handle([tensor], name, process_set).first().start()


@uncompiled
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Return the concatenations of several tensors as one operation; see `allgather`."""
    tensors = list(tensors)
    if _needs_gradient(tensors):
        return tuple(autograd.Allgather.apply(process_set, name, *tensors))
    return tuple(allgather_handle(tensors, name, process_set).wait())


@uncompiled
def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Submit `grouped_allgather`; no gradient flows through it."""
    return allgather_handle(list(tensors), name, process_set).then(tuple).start()


@uncompiled
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return rank `root_rank`'s tensor on every rank.

    Args:
        tensor: of equal shape and type on all ranks.
        root_rank: a rank of the world, also with a process set.
        name: of the operation.
        process_set: the ranks that take part.

    Raises:
        ValueError: `root_rank` does not take part.
    """
    if _needs_gradient([tensor]):
        output: torch.Tensor = autograd.Broadcast.apply(tensor, root_rank, name, process_set)
    else:
        output = broadcast_handle(tensor, root_rank, name, process_set).wait()
    return output


@uncompiled
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `broadcast`; no gradient flows through it."""
    return broadcast_handle(tensor, root_rank, name, process_set).start()


@uncompiled
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `broadcast_`."""
    return broadcast_handle(tensor, root_rank, name, process_set, in_place=True).start()


@uncompiled
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite every rank's tensor with rank `root_rank`'s, and return it; see `broadcast`."""
    handle = broadcast_handle(tensor, root_rank, name, process_set, in_place=True)
    output: torch.Tensor = handle.wait()
    return output


@uncompiled
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send part r of the first dimension to rank r; return what was received, by rank.

    Args:
        tensor: only the first dimension may differ between ranks.
        splits: [size] whole numbers, how many rows go to each rank; rows beyond their sum go
            nowhere. Without them all get the same.
        name: of the operation.
        process_set: the ranks that take part.

    Returns:
        The rows received; with `splits` also how many came from each rank (int32).

    Raises:
        ValueError: the splits sum to more than the first dimension, or it does not divide.
    """
    if _needs_gradient([tensor]):
        given = splits if splits is not None else _even_splits(tensor, process_set)
        rows, received = autograd.Alltoall.apply(tensor, given, name, process_set)
        return rows if splits is None else (rows, received)
    received = alltoall_handle(tensor, splits, name, process_set).wait()
    return received[0] if splits is None else received


@uncompiled
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `alltoall`, whose result is (tensor, received splits); no gradient flows through."""
    return alltoall_handle(tensor, splits, name, process_set).start()


def _even_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int]:
    size = require_process_set(process_set).size() or 1
    return [tensor.shape[0] // size] * size


@uncompiled
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of a reduction, cut along the first dimension.

    Parts are as even as can be; lower ranks get the larger ones. See `allreduce`.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


@uncompiled
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Submit `reducescatter`; no gradient flows through it."""
    op = choose_op(op, None)
    factors = (prescale_factor, postscale_factor)
    return reducescatter_handle([tensor], op, name, process_set, *factors).first().start()


@uncompiled
def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's parts of several reductions as one operation; see `reducescatter`."""
    op = choose_op(op, None)
    pairs = [compression.compress(tensor) for tensor in tensors]
    inputs = [tensor for tensor, _ in pairs]
    if _needs_gradient(inputs):
        arguments = (op, process_set, prescale_factor, postscale_factor)
        outputs = autograd.ReduceScatter.apply(arguments, name, *inputs)
    else:
        factors = (prescale_factor, postscale_factor)
        outputs = reducescatter_handle(inputs, op, name, process_set, *factors).wait()
    contexts = [context for _, context in pairs]
    return [
        compression.decompress(output, context)
        for output, context in zip(outputs, contexts, strict=True)
    ]


@uncompiled
def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Submit `grouped_reducescatter`; no gradient flows through it."""
    op = choose_op(op, None)
    factors = (prescale_factor, postscale_factor)
    handle = reducescatter_handle(list(tensors), op, name, process_set, *factors)
    return handle.then(tuple).start()


@uncompiled
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    operations.barrier(channel_of(process_set))


@uncompiled
def join(device: int = -1) -> int:
    """Take part in the others' reductions with zeros until all ranks have joined.

    Args:
        device: for Horovod's sake; it makes no difference.

    Returns:
        The rank that joined last.
    """
    return operations.join()
