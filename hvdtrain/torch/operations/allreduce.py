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
from typing import Any

import torch

from hvdtrain.core import operations
from hvdtrain.core.arguments import choose_op, op_on_wire
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.compression import Compression, Compressor
from hvdtrain.torch.operations.divergence import note_exchanged
from hvdtrain.torch.operations.handle import Handle, needs_gradient
from hvdtrain.torch.tensors.buffers import as_buffer, dtype_of, require_tensors
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.routes import Route, order, route_of
from hvdtrain.types import ReduceOp

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allreduce_handle",
    "average_gradients",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]

Tensors = Sequence[torch.Tensor]


@disable_compile
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
    factors = (prescale_factor, postscale_factor)
    if compression is Compression.none and not needs_gradient((tensor,)):
        reduced: torch.Tensor = allreduce_handle([tensor], op, name, *factors, process_set).wait()[
            0
        ]
        return reduced
    return grouped_allreduce([tensor], None, name, compression, op, *factors, process_set)[0]


@disable_compile
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
    factors = (prescale_factor, postscale_factor)
    return allreduce_handle([tensor], op, name, *factors, process_set).first().start()


@disable_compile
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
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place=True)
    return handle.first().start()


@disable_compile
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
    factors = (prescale_factor, postscale_factor)
    handle = allreduce_handle([tensor], op, name, *factors, process_set, in_place=True)
    reduced: torch.Tensor = handle.first().wait()
    return reduced


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
    if needs_gradient(inputs):
        arguments = (op, prescale_factor, postscale_factor, process_set)
        outputs = _Allreduce.apply(arguments, name, *inputs)  # type: ignore[no-untyped-call]
    else:
        factors = (prescale_factor, postscale_factor)
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


class _Allreduce(torch.autograd.Function):
    """Reduction of a group; its gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any, arguments: tuple[Any, ...], name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        op, prescale_factor, postscale_factor, process_set = arguments
        handle = allreduce_handle(tensors, op, name, prescale_factor, postscale_factor, process_set)
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reduced = _Allreduce.apply(ctx.arguments, None, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, *reduced)


def average_gradients(gradients: Tensors, process_set: ProcessSet) -> tuple[torch.Tensor, ...]:
    """Return the averages of a group of gradients, differentiably (collective).

    Args:
        gradients: gradients that this rank sends back.
        process_set: ranks that take part.
    """
    arguments = (ReduceOp.AVERAGE, 1.0, 1.0, process_set)
    averaged: tuple[torch.Tensor, ...]
    averaged = _Allreduce.apply(arguments, None, *gradients)  # type: ignore[no-untyped-call]
    return averaged


def allreduce_handle(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    """Prepare the reduction of one tensor or of a group, whose result is a list of tensors.

    Args:
        tensors: tensors to reduce.
        op, name, prescale_factor, postscale_factor, process_set: as in `allreduce`.
        in_place: overwrite the tensors with the results.
    """
    require_tensors(tensors)
    note_exchanged(tensors)
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([dtype_of(tensor).value for tensor in tensors], op, *factors)
    channel = channel_of(process_set)
    routes, sent, targets, sources = [], [], [], []
    all_direct = True
    for tensor in tensors:
        route = route_of(channel, tensor)
        direct = route.reduces(tensor, op)
        all_direct &= direct
        source, target = _source_and_target(route, tensor, op, in_place, direct)
        routes.append(route)
        sent.append(target)
        targets.append(as_buffer(target))
        sources.append(targets[-1] if source is target else as_buffer(source))
    submitted = operations.allreduce(
        channel,
        targets,
        [tensor.shape for tensor in tensors],
        wire_op,
        name,
        *factors,
        kinds,
        sources,
    )

    def finish(_: None) -> list[torch.Tensor]:
        if all_direct:
            return list(tensors) if in_place else sent
        triples = zip(routes, tensors, sent, strict=True)
        return [_result(route, tensor, target, op, in_place) for route, tensor, target in triples]

    return Handle(order(submitted, routes), finish)


def _source_and_target(
    route: Route, tensor: torch.Tensor, op: ReduceOp, in_place: bool, direct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors that the engine reads and writes."""
    if not direct:
        copy = route.copied(tensor, route.wire_type(tensor.dtype, op))
        return copy, copy
    source = route.own(tensor)
    return source, source if in_place else route.empty_like(tensor)


def _result(
    route: Route, tensor: torch.Tensor, target: torch.Tensor, op: ReduceOp, in_place: bool
) -> torch.Tensor:
    """Return the user's result, given what the engine wrote."""
    direct = route.reduces(tensor, op)
    if not in_place:
        return target if direct else route.returned(target, tensor)
    if not direct:
        route.write_back(target, tensor)
    return tensor
