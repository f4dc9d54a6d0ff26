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

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import modules
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.agreement.channel import KNOWN_CALLS, Channel, keep_call
from hvdtrain.core.allreduce import AllreduceTemplate, TemplateAllreduce
from hvdtrain.core.compression import Compressor
from hvdtrain.core.operations import check_has_gradient, choose_op, op_on_wire
from hvdtrain.core.process_set import (
    ProcessSet,
    channel_of,
    global_process_set,
    require_process_set,
)
from hvdtrain.torch.compression import Compression
from hvdtrain.torch.operations.dynamo import disable_compile, is_compiling
from hvdtrain.torch.operations.handle import Handle, Tensors, Verb, run_compressed
from hvdtrain.torch.operations.routes import (
    Route,
    as_buffer,
    dtype_of,
    is_plain,
    order,
    require_tensors,
    route_of,
)
from hvdtrain.torch.operations.watched_models import monitor
from hvdtrain.types import ReduceOp

_AVERAGE = ReduceOp.AVERAGE  # Python 3.11 looks up members of an Enum in Python
_NONE, _data_ptr = Compression.none, torch.Tensor.data_ptr


@dataclass(slots=True)
class _KnownCall:
    """What calls have in common that differ in their tensors only."""

    channel: Channel
    routes: list[Route]
    wires: list[torch.dtype | None]  # in which copies are reduced; None for tensors themselves
    copies: bool
    elements: int
    on_host: bool
    wire_op: ReduceOp
    kinds: list[str]
    reduction: AllreduceTemplate | None = None
    # Of one tensor: how calls are known again, and the last one's, which was plain.
    terms: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    shape: torch.Size | None = None
    seen: Callable[[], object] = object
    repeatable: AllreduceTemplate | None = None  # the reduction, if it is of the tensor itself


def allreduce_handle(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
    call: _KnownCall | None = None,
) -> Handle:
    """Prepare the reduction of one tensor or of a group, whose output is a list of tensors."""
    terms = (name, op, prescale_factor, postscale_factor, process_set)
    if call is None:
        call = (len(tensors) == 1 and _find(tensors[0], terms)) or _make(tensors, *terms)
    monitor.exchanged += call.elements
    sources: Tensors
    targets: Tensors
    if call.copies or not call.on_host:
        sources = [
            route.own(tensor) if wire is None else route.copied(tensor, wire)
            for wire, route, tensor in zip(call.wires, call.routes, tensors, strict=True)
        ]
        targets = sources
        if not in_place:  # copies are reduced in place anyway
            pairs = zip(call.wires, sources, strict=True)
            targets = [torch.empty_like(each) if wire is None else each for wire, each in pairs]
    else:
        sources, targets = tensors, tensors if in_place else [*map(torch.empty_like, tensors)]
    channel = call.channel
    if not name or type(name) is not str:
        name = channel.name("allreduce", name)
    reduction = call.reduction or _check(call, terms, name, tensors, targets)
    if call.on_host:
        operation = TemplateAllreduce(reduction, name, sources, targets, _data_ptr)
    else:
        operation = TemplateAllreduce(reduction, name, *_buffers(call, sources, targets))
    handle = Handle(channel, operation, None, tensors if in_place else targets)
    if call.copies:
        each = list(zip(call.wires, call.routes, tensors, targets, strict=True))
        handle.convert = lambda _: [_result(*one, in_place) for one in each]
    return handle if call.on_host else order(handle, call.routes)


def _find(tensor: torch.Tensor, terms: tuple[Any, ...]) -> _KnownCall | None:
    """Return what is known of such a call; only for a tensor that needs no preparation."""
    name = terms[0]
    if name is not None and type(name) is not str:
        return None
    # The last one of this name, usually the right one.
    call: _KnownCall | None = KNOWN_CALLS.get(name)
    # Of one tensor only shape and strides change. These checks release the GIL, which would wake
    # the channel's thread.
    seen = call is not None and call.seen() is tensor
    if not (
        (seen or type(tensor) is torch.Tensor)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and (seen or is_plain(tensor))
    ):
        return None
    if (
        call is None
        or call.dtype is not tensor.dtype
        or call.terms != terms
        or call.shape != tensor.shape
    ):
        require_process_set(terms[-1])
        call = KNOWN_CALLS.get((terms, tensor.dtype, tensor.shape))
        if call is None:
            return None
        keep_call(call, call.channel, name)
        seen = False
    if not seen:
        call.seen = weakref.ref(tensor)
    return call


def _make(
    tensors: Tensors,
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> _KnownCall:
    """Find what such calls have in common; check what can be checked without their memory."""
    require_tensors(tensors)
    kinds = [dtype_of(tensor).value for tensor in tensors]
    wire_op, kinds = op_on_wire(kinds, op, prescale, postscale)
    channel = channel_of(process_set)
    routes = [route_of(channel, tensor) for tensor in tensors]
    wires = [
        None if route.reduces(tensor, op) else route.wire_type(tensor.dtype, op)
        for route, tensor in zip(routes, tensors, strict=True)
    ]
    elements = sum(tensor.numel() for tensor in tensors)
    on_host = all(tensor.is_cpu for tensor in tensors)
    copies = any(wire is not None for wire in wires)
    return _KnownCall(channel, routes, wires, copies, elements, on_host, wire_op, kinds)


def _check(
    call: _KnownCall, terms: tuple[Any, ...], full_name: str, tensors: Tensors, targets: Tensors
) -> AllreduceTemplate:
    """Check a call that is not known, and keep what is found for others like it."""
    name, _, prescale, postscale, _ = terms
    call.reduction = operations.make_template(
        call.channel,
        [as_buffer(target) for target in targets],
        [tensor.shape for tensor in tensors],
        call.wire_op,
        full_name,
        prescale,
        postscale,
        call.kinds,
    )
    tensor = tensors[0]
    if (
        len(tensors) == 1
        and type(tensor) is torch.Tensor
        and tensor.is_cpu
        and is_plain(tensor)
        and (name is None or type(name) is str)
    ):
        call.terms, call.dtype, call.shape = terms, tensor.dtype, tensor.shape
        call.seen = weakref.ref(tensor)
        if not call.copies and call.reduction.request.name == (name or ""):
            call.repeatable = call.reduction
        keep_call(call, call.channel, name, (terms, tensor.dtype, tensor.shape))
    return call.reduction


def _buffers(
    call: _KnownCall, sources: Tensors, targets: Tensors
) -> tuple[Sequence[Buffer], Sequence[Buffer]]:
    """Return buffers of tensors of which some are on a device, whose streams keep them."""
    read, written = [], []
    for route, wire, source, target in zip(call.routes, call.wires, sources, targets, strict=True):
        if wire is None:
            for memory in (source, target):
                route.streams.keep(memory)
        written.append(as_buffer(target))
        read.append(written[-1] if source is target else as_buffer(source))
    return read, written


def _result(
    wire: torch.dtype | None,
    route: Route,
    tensor: torch.Tensor,
    target: torch.Tensor,
    in_place: bool,
) -> torch.Tensor:
    """Return the user's result, given what the engine wrote."""
    if wire is None:
        return tensor if in_place else target
    if not in_place:
        return route.returned(target, tensor)
    route.write_back(target, tensor)
    return tensor


@collective
def _gradient(
    gradients: Tensors,
    _: Any,
    op: ReduceOp,
    name: str | None,
    *rest: Any,
) -> Sequence[torch.Tensor]:
    """Reduce gradients in the same way."""
    check_has_gradient("allreduce", op)
    return ALLREDUCE.run(gradients, op, None, *rest)


ALLREDUCE = Verb(allreduce_handle, _gradient)


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
    arguments = (op, name, prescale_factor, postscale_factor, process_set)
    return run_compressed(ALLREDUCE, tensors, compression, *arguments)


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
    return tuple(handle.run())


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
    call, compiling = None, "torch._dynamo" in modules and is_compiling()
    if not compiling and average is None and compression is _NONE:
        reduction = _AVERAGE if op is None else op
        call = _find(tensor, (name, reduction, prescale_factor, postscale_factor, process_set))
        if call is not None and call.repeatable is not None and not tensor.requires_grad:
            result: torch.Tensor | None
            result = call.channel.repeat(call.repeatable, name, tensor, _data_ptr, torch.empty_like)
            if result is not None:
                monitor.exchanged += call.elements
                return result
    terms = (name, compression, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(call, tensor, average, *terms)


@disable_compile
@collective
def _allreduce(
    call: _KnownCall | None,
    tensor: torch.Tensor,
    average: bool | None,
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp | None,
    *rest: *tuple[float, float, ProcessSet],
) -> torch.Tensor:
    terms = (choose_op(op, average), name, *rest)
    if compression is not Compression.none or getattr(tensor, "requires_grad", False):
        return run_compressed(ALLREDUCE, [tensor], compression, *terms)[0]
    reduced: torch.Tensor = allreduce_handle((tensor,), *terms, False, call).run()[0]
    return reduced


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
    factors = (prescale_factor, postscale_factor)
    return allreduce_handle([tensor], op, name, *factors, process_set).first().start()


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
    factors = (prescale_factor, postscale_factor)
    return allreduce_handle([tensor], op, name, *factors, process_set, True).first().start()


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
    call, compiling = None, "torch._dynamo" in modules and is_compiling()
    if not compiling and average is None:
        reduction = _AVERAGE if op is None else op
        call = _find(tensor, (name, reduction, prescale_factor, postscale_factor, process_set))
        if (
            call is not None
            and call.repeatable is not None
            and call.channel.repeat(call.repeatable, name, tensor, _data_ptr, None) is not None
        ):
            monitor.exchanged += call.elements
            return tensor
    op, factors = choose_op(op, average), (prescale_factor, postscale_factor)
    _allreduce_((tensor,), op, name, *factors, process_set, True, call)
    return tensor


@disable_compile
@collective
def _allreduce_(*arguments: Any) -> None:
    allreduce_handle(*arguments).run()
