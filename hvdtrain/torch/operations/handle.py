"""Handles of operations in progress; barrier and join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.arguments import check_has_gradient, op_on_wire
from hvdtrain.core.operations import Submission
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.divergence import note_exchanged
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.routes import (
    Route,
    as_buffer,
    dtype_of,
    order,
    require_tensors,
    route_of,
)
from hvdtrain.types import ReduceOp


@disable_compile
@collective
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called it (collective)."""
    operations.barrier(channel_of(process_set))


@disable_compile
@collective
def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' reductions until all ranks have joined (collective).

    Args:
        device: accepted for compatibility with Horovod; it has no effect.

    Returns:
        The rank that joined last: one that missed none of the operations before, if there is one.
    """
    return operations.join()


class Handle:
    """An operation on tensors, which start() submits and wait() completes."""

    def __init__(
        self, submitted: Submission, finish: Callable[[Any], Any], started: bool = False
    ) -> None:
        self._submitted = submitted
        self._finish: Callable[[Any], Any] | None = finish
        self._started = started
        self._output: Any = None

    @collective
    def start(self) -> Handle:
        """Submit the operation and return at once (in any order)."""
        self._submitted.start()
        self._started = True
        return self

    def then(self, function: Callable[[Any], Any]) -> Handle:
        """Make wait() return function(result) instead of the result."""
        finish = self._finish
        if finish is not None:
            self._finish = lambda result: function(finish(result))
        return self

    def first(self) -> Handle:
        """Make wait() return only the first of several results."""
        return self.then(lambda results: results[0])

    def done(self) -> bool:
        """Return whether wait() would return at once."""
        return self._submitted.done()

    @disable_compile
    def wait(self) -> Any:
        """Block until the operation is complete; return its result or raise its error."""
        if self._finish is not None:
            result = self._submitted.wait() if self._started else self._submitted.run()
            self._output = self._finish(result)
            self._finish = None
        return self._output

    def __call__(self) -> Any:
        """Wait, as callers of Horovod's sparse_allreduce_async do."""
        return self.wait()


class StartedHandle(Handle):
    """A submitted operation without a result of its own, which writes into a known tensor."""

    def __init__(self, channel: Channel, operation: Operation, target: torch.Tensor) -> None:
        self._channel, self._operation, self._target = channel, operation, target

    def start(self) -> Handle:
        raise NotImplementedError  # it is submitted

    def then(self, function: Callable[[Any], Any]) -> Handle:
        submitted = Submission(self._channel, self._operation)
        return Handle(submitted, lambda _: function(self._target), started=True)

    def done(self) -> bool:
        return self._channel.poll(self._operation)

    @disable_compile
    def wait(self) -> Any:
        return self.completed()

    def completed(self) -> torch.Tensor:
        """Do what wait() does, called by functions that torch.compile leaves alone."""
        operation = self._operation
        if not operation.done or operation.failed:
            Submission(self._channel, operation).wait()
        return self._target


@disable_compile
def poll(handle: Handle) -> bool:
    """Return whether synchronize() would return at once (local).

    Raises:
        TypeError: `handle` is not a handle.
    """
    return _checked(handle).done()


@disable_compile
def synchronize(handle: Handle | None) -> Any:
    """Block until an asynchronous operation is complete; return its result or raise its error.

    The result may be asked for again. None stands for no operation and returns None.

    Raises:
        TypeError: `handle` is not a handle.
    """
    if type(handle) is StartedHandle:
        return handle.completed()  # the usual case
    return None if handle is None else _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"expected the handle that an operation ending in _async returned, got {handle!r}"
        )
    return handle


def needs_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether autograd must record an operation on these tensors."""
    require_tensors(tensors)
    return any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled()


Tensors = Sequence[torch.Tensor]
# op, prescale_factor, postscale_factor, process_set
_Arguments: TypeAlias = tuple[ReduceOp, float, float, ProcessSet]


def allreduce_handle(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    in_place: bool = False,
) -> Handle:
    """Prepare the reduction of one tensor or of a group, whose result is a list of tensors."""
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


@collective
def differentiable_allreduce(
    tensors: Tensors,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> tuple[torch.Tensor, ...]:
    """Return the reductions of a group of tensors, differentiably."""
    arguments = (op, prescale_factor, postscale_factor, process_set)
    reduced: tuple[torch.Tensor, ...]
    reduced = _Allreduce.apply(arguments, name, *tensors)  # type: ignore[no-untyped-call]
    return reduced


@collective
def average_gradients(gradients: Tensors, process_set: ProcessSet) -> tuple[torch.Tensor, ...]:
    """Return the averages of a group of gradients, differentiably."""
    return differentiable_allreduce(gradients, ReduceOp.AVERAGE, None, 1.0, 1.0, process_set)


class _Allreduce(torch.autograd.Function):
    """Reduction of a group; its gradient is reduced in the same way."""

    @staticmethod
    def forward(
        ctx: Any, arguments: _Arguments, name: str | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        op, prescale_factor, postscale_factor, process_set = arguments
        handle = allreduce_handle(tensors, op, name, prescale_factor, postscale_factor, process_set)
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_has_gradient("allreduce", ctx.arguments[0])
        reduced = _Allreduce.apply(ctx.arguments, None, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, *reduced)
