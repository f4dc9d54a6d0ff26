"""Allgather of PyTorch tensors; see `allreduce` for what holds for all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.allreduce import ALLREDUCE
from hvdtrain.torch.operations.divergence import note_exchanged
from hvdtrain.torch.operations.handle import Handle, Tensors, Verb
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.routes import as_buffer, order, require_tensors, route_of
from hvdtrain.types import ReduceOp


@disable_compile
@collective
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order.

    Args:
        tensor: tensor whose dtype and dimensions after the first are equal on all ranks; a 0-d
            tensor counts as one element.
        name: name of the operation.
        process_set: ranks that take part.

    Returns:
        A tensor of shape [sum of the ranks' first dimensions, ...], of the input's dtype.
    """
    return grouped_allgather([tensor], name, process_set)[0]


@disable_compile
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Submit `allgather`, without gradients.

    Args:
        tensor: tensor to gather; must not change before the operation is complete.
        name: name of the operation.
        process_set: ranks that take part.
    """
    return allgather_handle([tensor], name, process_set).first().start()


@disable_compile
@collective
def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Return the concatenations of several tensors as one operation.

    Args:
        tensors: tensors to gather, each as in `allgather`.
        name: name of the operation.
        process_set: ranks that take part.
    """
    return tuple(ALLGATHER.run(list(tensors), name, process_set, ReduceOp.AVERAGE))


@disable_compile
def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Submit `grouped_allgather`, without gradients.

    Args:
        tensors: tensors to gather; must not change before the operation is complete.
        name: name of the operation.
        process_set: ranks that take part.
    """
    return allgather_handle(list(tensors), name, process_set).then(tuple).start()


@disable_compile
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit the Sum or Average of sparse tensors, computed by gathering their elements.

    Calling the handle waits for the operation too, as in Horovod.

    Args:
        tensor: sparse COO tensor; shape and dtype are equal on all ranks.
        name: name of the operation.
        op: Average or Sum.
        process_set: ranks that take part.

    Returns:
        A handle whose result is a sparse tensor of the same shape and dtype, not coalesced.

    Raises:
        ValueError: `op` is neither Average nor Sum.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"sparse tensors are reduced by Average or Sum, got {op}")
    # Rows of the gathered tensors are elements: [nnz, dimensions] indices and [nnz, ...] values.
    indices = tensor._indices().t()
    handle = allgather_handle([indices, tensor._values()], name, process_set)
    size = process_set.size() or 1

    def finish(gathered: list[torch.Tensor]) -> torch.Tensor:
        rows, values = gathered
        if op is ReduceOp.AVERAGE:
            values = values / size
        # On a GPU the check would make the host wait for the device.
        check = tensor.is_cpu
        return torch.sparse_coo_tensor(
            rows.t(), values, tensor.shape, device=values.device, check_invariants=check
        )

    return handle.then(finish).start()


@collective
def _gradient(
    gradients: Tensors, kept: Any, name: str | None, process_set: ProcessSet, back: ReduceOp
) -> Sequence[torch.Tensor]:
    """Return this rank's parts of the averages, or sums, of what ranks send `back`."""
    reduced = ALLREDUCE.run(gradients, back, None, 1.0, 1.0, process_set)
    own = [torch.tensor(shape[0] if shape else 1, device="cpu") for shape in kept.shapes]
    rows = allgather_handle(own, None, process_set).run()
    rank = process_set.rank()
    return [
        gradient.narrow(0, int(counts[:rank].sum()), int(counts[rank])).reshape(shape)
        for gradient, counts, shape in zip(reduced, rows, kept.shapes, strict=True)
    ]


def allgather_handle(
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Prepare the gathering of one tensor or of a group, whose result is a list of tensors."""
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    require_tensors(tensors)
    note_exchanged(tensors)
    channel = channel_of(process_set)
    routes = [route_of(channel, tensor) for tensor in tensors]
    sent = [_at_least_1d(route.sent(tensor)) for route, tensor in zip(routes, tensors, strict=True)]
    submitted = operations.allgather(
        channel, [as_buffer(tensor) for tensor in sent], [tensor.shape for tensor in sent], name
    )

    def finish(gathered: list[tuple[Buffer, list[int]]]) -> list[torch.Tensor]:
        return [
            route.received(buffer, tensor).reshape(sum(rows), *tensor.shape[1:])
            for route, tensor, (buffer, rows) in zip(routes, tensors, gathered, strict=True)
        ]

    return Handle(channel, order(submitted, routes).operation, finish)


ALLGATHER = Verb(lambda tensors, name, where, _: allgather_handle(tensors, name, where), _gradient)


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor
