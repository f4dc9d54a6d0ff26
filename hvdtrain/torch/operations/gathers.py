"""Operations of PyTorch tensors beside allreduce; `allreduce` says what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.agreement.channel import Channel, Submission
from hvdtrain.core.compression import Compressor
from hvdtrain.core.gathers import rows_of_rank
from hvdtrain.core.operations import check_has_gradient, choose_op, op_on_wire
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.compression import Compression
from hvdtrain.torch.operations.allreduce import ALLREDUCE
from hvdtrain.torch.operations.dynamo import disable_compile
from hvdtrain.torch.operations.handle import Handle, Tensors, Verb, run_compressed
from hvdtrain.torch.operations.routes import (
    Route,
    as_buffer,
    dtype_of,
    order,
    require_tensors,
    route_of,
)
from hvdtrain.torch.operations.watched_models import monitor
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

    def convert(gathered: list[torch.Tensor]) -> torch.Tensor:
        rows, values = gathered
        if op is ReduceOp.AVERAGE:
            values = values / size
        # On a GPU the check would make the host wait for the device.
        check = tensor.is_cpu
        return torch.sparse_coo_tensor(
            rows.t(), values, tensor.shape, device=values.device, check_invariants=check
        )

    return handle.then(convert).start()


@collective
def _allgather_gradient(
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
    channel, routes = _routes(tensors, process_set)
    monitor.note_exchanged(tensors)
    pairs = zip(routes, tensors, strict=True)
    sent = [torch.atleast_1d(route.sent(tensor)) for route, tensor in pairs]
    submitted = operations.allgather(
        channel, [as_buffer(tensor) for tensor in sent], [tensor.shape for tensor in sent], name
    )

    def convert(gathered: list[tuple[Buffer, list[int]]]) -> list[torch.Tensor]:
        return [
            route.received(buffer, tensor).reshape(sum(rows), *tensor.shape[1:])
            for route, tensor, (buffer, rows) in zip(routes, tensors, gathered, strict=True)
        ]

    return _handle(submitted, routes, convert)


def _routes(tensors: Tensors, process_set: ProcessSet) -> tuple[Channel, list[Route]]:
    """Return the channel of the tensors, and how each reaches its engine."""
    require_tensors(tensors)
    channel = channel_of(process_set)
    return channel, [route_of(channel, tensor) for tensor in tensors]


def _handle(
    submitted: Submission, routes: Sequence[Route], convert: Callable[[Any], object]
) -> Handle:
    return Handle(submitted.channel, order(submitted, routes).operation, convert)


ALLGATHER = Verb(
    lambda tensors, name, where, _: allgather_handle(tensors, name, where), _allgather_gradient
)


Splits = torch.Tensor | Sequence[int] | None


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor: ...


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@disable_compile
def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send part r of the first dimension to rank r and return what was received, in rank order.

    Args:
        tensor: tensor of shape [rows, ...]; dtype and dimensions after the first are equal on all
            ranks.
        splits: [size] integers, the number of rows for each rank; rows beyond their sum are not
            sent. Without them every rank gets the same number.
        name: name of the operation.
        process_set: ranks that take part.

    Returns:
        The rows received, and with `splits` also the number of rows from each rank ([size] int32).

    Raises:
        ValueError: the splits sum to more than the first dimension, or, without splits, the first
            dimension is not divisible by the number of ranks.
    """
    rows, received = ALLTOALL.run([tensor], splits, name, process_set)
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    result = rows if splits is None else (rows, received)
    return result


@disable_compile
def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `alltoall`, without gradients; the result is always (tensor, received splits).

    Args:
        tensor: tensor to send; must not change before the operation is complete.
        splits, name, process_set: as in `alltoall`.
    """
    return _alltoall_handle([tensor], splits, name, process_set).start()


def _alltoall_gradient(
    gradients: Tensors, kept: Any, splits: Splits, name: str | None, process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    """Send gradients back to the ranks that the rows came from."""
    (shape,), (received,) = kept.shapes, kept.counts
    sent, _ = ALLTOALL.run(gradients[:1], received, None, process_set)
    return [torch.cat([sent, sent.new_zeros(shape[0] - sent.shape[0], *sent.shape[1:])])]


def _alltoall_handle(
    tensors: Tensors, splits: Splits, name: str | None, process_set: ProcessSet
) -> Handle:
    channel, (route,) = _routes(tensors, process_set)
    monitor.note_exchanged(tensors)
    (tensor,), counts = tensors, _counts(splits)
    sent = route.sent(tensor if counts is None or not tensor.dim() else tensor[: sum(counts)])
    submitted = operations.alltoall(channel, as_buffer(sent), sent.shape, counts, name)

    def convert(result: tuple[Buffer, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        buffer, received = result
        rows = route.received(buffer, tensor).reshape(sum(received), *tensor.shape[1:])
        device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
        return rows, torch.tensor(received, dtype=torch.int32, device=device)

    return _handle(submitted, [route], convert)


ALLTOALL = Verb(_alltoall_handle, _alltoall_gradient)


def _counts(splits: Splits) -> list[int] | None:
    if splits is None or len(splits) == 0:  # Horovod has both ways to ask for equal parts
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.is_floating_point():
            raise ValueError(f"splits must be a 1-d array of integers, got {splits}")
        return [int(count) for count in splits.tolist()]
    return [int(count) for count in splits]


@disable_compile
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of rank `root_rank` on every rank.

    Args:
        tensor: tensor of any shape; shape and dtype are equal on all ranks.
        root_rank: rank in the world, also with a process set.
        name: name of the operation.
        process_set: ranks that take part.

    Raises:
        ValueError: `root_rank` is not in the process set.
    """
    return BROADCAST.run([tensor], root_rank, name, process_set)[0]


@disable_compile
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `broadcast`, without gradients.

    Args:
        tensor: tensor to send; must not change before the operation is complete.
        root_rank, name, process_set: as in `broadcast`.
    """
    return _broadcast_handle([tensor], root_rank, name, process_set).first().start()


@disable_compile
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit `broadcast_`.

    Args:
        tensor: tensor to overwrite.
        root_rank, name, process_set: as in `broadcast`.
    """
    handle = _broadcast_handle([tensor], root_rank, name, process_set, in_place=True)
    return handle.first().start()


@disable_compile
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite the tensor of every rank with that of rank `root_rank` and return it.

    Args:
        tensor: tensor to overwrite.
        root_rank, name, process_set: as in `broadcast`.
    """
    handle = _broadcast_handle([tensor], root_rank, name, process_set, in_place=True)
    output: torch.Tensor = handle.run()[0]
    return output


@collective
def _broadcast_gradient(
    gradients: Tensors, _: Any, root_rank: int, name: str | None, process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    """Return the average over ranks on the root rank, and zero on the others."""
    (averaged,) = ALLREDUCE.run(gradients, ReduceOp.AVERAGE, None, 1.0, 1.0, process_set)
    if context.current().topology.rank != root_rank:
        # Part of the graph, so that all ranks reduce when this is differentiated again.
        averaged = averaged.masked_fill(torch.ones_like(averaged, dtype=torch.bool), 0)
    return [averaged]


def _broadcast_handle(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    (channel, (route,)), (tensor,) = _routes(tensors, process_set), tensors
    direct = in_place and route.takes(tensor)
    sent = route.own(tensor) if direct else route.copied(tensor)
    submitted = operations.broadcast(channel, as_buffer(sent), tensor.shape, root_rank, name)

    def convert(_: None) -> list[torch.Tensor]:
        if not in_place:
            return [route.returned(sent, tensor)]
        if not direct:
            route.write_back(sent, tensor)
        return [tensor]

    return _handle(submitted, [route], convert)


BROADCAST = Verb(_broadcast_handle, _broadcast_gradient)


@disable_compile
@collective
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of a reduction, divided along the first dimension.

    Parts are as even as possible; lower ranks get the larger ones.

    Args:
        tensor: tensor of shape [rows, ...]; shape and dtype are equal on all ranks.
        name: name of the operation.
        compression: how the tensor is rounded before the reduction.
        op: Average or Sum.
        process_set: ranks that take part.
        prescale_factor: factor applied before the reduction.
        postscale_factor: factor applied after it.

    Returns:
        A tensor of shape [rows of this rank, ...], of the input's dtype.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


@disable_compile
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Submit `reducescatter`, without gradients.

    Args:
        tensor: tensor to reduce; must not change before the operation is complete.
        name, op, process_set, prescale_factor, postscale_factor: as in `reducescatter`.
    """
    op = choose_op(op, None)
    factors = (prescale_factor, postscale_factor)
    return _reducescatter_handle([tensor], op, name, process_set, *factors).first().start()


@disable_compile
@collective
def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's parts of several reductions as one operation.

    Args:
        tensors: tensors to reduce, each as in `reducescatter`.
        name, compression, op, process_set, prescale_factor, postscale_factor: as in
            `reducescatter`.
    """
    op = choose_op(op, None)
    arguments = (op, name, process_set, prescale_factor, postscale_factor)
    return run_compressed(REDUCESCATTER, tensors, compression, *arguments)


@disable_compile
def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | None = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Submit `grouped_reducescatter`, without gradients.

    Args:
        tensors: tensors to reduce; must not change before the operation is complete.
        name, op, process_set, prescale_factor, postscale_factor: as in `reducescatter`.
    """
    op = choose_op(op, None)
    factors = (prescale_factor, postscale_factor)
    handle = _reducescatter_handle(list(tensors), op, name, process_set, *factors)
    return handle.then(tuple).start()


@collective
def _reducescatter_gradient(
    gradients: Tensors,
    _: Any,
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Sequence[torch.Tensor]:
    """Gather the gradients of all parts."""
    check_has_gradient("reducescatter", op)
    factor = prescale_factor * postscale_factor
    if op is ReduceOp.SUM:
        factor *= process_set.size() or 1
    scaled = [gradient * factor for gradient in gradients]
    return ALLGATHER.run(scaled, None, process_set, ReduceOp.SUM)


def _reducescatter_handle(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Handle:
    channel, routes = _routes(tensors, process_set)
    monitor.note_exchanged(tensors)
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([dtype_of(tensor).value for tensor in tensors], op, *factors)
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

    def convert(buffers: list[Buffer]) -> list[torch.Tensor]:
        return [
            route.received(buffer, tensor).reshape(
                rows_of_rank(tensor.shape[0], rank, size), *tensor.shape[1:]
            )
            for (route, tensor), buffer in zip(pairs, buffers, strict=True)
        ]

    return _handle(submitted, routes, convert)


REDUCESCATTER = Verb(_reducescatter_handle, _reducescatter_gradient)
