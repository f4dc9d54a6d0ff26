"""Reduce-scatter of PyTorch tensors; see `allreduce` for what holds for all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.arguments import check_has_gradient, choose_op, op_on_wire
from hvdtrain.core.collectives.gathers import rows_of_rank
from hvdtrain.core.compression import Compressor
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.compression import Compression
from hvdtrain.torch.operations.divergence import note_exchanged
from hvdtrain.torch.operations.gathers import ALLGATHER
from hvdtrain.torch.operations.handle import Handle, Tensors, Verb, run_compressed
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.routes import as_buffer, dtype_of, order, require_tensors, route_of
from hvdtrain.types import ReduceOp


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
def _gradient(
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
    require_tensors(tensors)
    note_exchanged(tensors)
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([dtype_of(tensor).value for tensor in tensors], op, *factors)
    channel = channel_of(process_set)
    routes = [route_of(channel, tensor) for tensor in tensors]
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

    def finish(buffers: list[Buffer]) -> list[torch.Tensor]:
        return [
            route.received(buffer, tensor).reshape(
                rows_of_rank(tensor.shape[0], rank, size), *tensor.shape[1:]
            )
            for (route, tensor), buffer in zip(pairs, buffers, strict=True)
        ]

    return Handle(channel, order(submitted, routes).operation, finish)


REDUCESCATTER = Verb(_reducescatter_handle, _gradient)
