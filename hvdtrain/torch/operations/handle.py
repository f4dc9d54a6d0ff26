"""Handles of operations in progress, the gradients of operations, barrier and join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.agreement.channel import Submission
from hvdtrain.core.compression import Compressor
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.operations.dynamo import disable_compile
from hvdtrain.torch.operations.routes import require_tensors

Tensors = Sequence[torch.Tensor]


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


class Handle(Submission):
    """An operation on tensors: start() submits it and wait() completes it, or run() does both."""

    __slots__ = ()

    def then(self, function: Callable[[Any], Any]) -> Handle:
        """Make the output function(output) instead."""
        convert, output = self.convert, self.output
        self.convert = lambda result: function(convert(result) if convert else output)
        return self

    def first(self) -> Handle:
        """Make the output only the first of several."""
        if self.convert is not None:
            return self.then(lambda outputs: outputs[0])
        self.output = self.output[0]
        return self

    @disable_compile
    def wait(self) -> Any:
        """Block until the operation is complete; return its result or raise its error."""
        return super().wait()

    def __call__(self) -> Any:
        """Wait, as callers of Horovod's sparse_allreduce_async do."""
        return self.wait()


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
    return None if handle is None else _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"expected the handle that an operation ending in _async returned, got {handle!r}"
        )
    return handle


@dataclass(frozen=True)
class Verb:
    """One of the operations: how it is prepared, and what its gradient is.

    Both take the same arguments. A gradient is made of the verbs themselves, so that it can be
    differentiated again, and gets what autograd has kept: see `_Recorded`.
    """

    prepare: Callable[..., Handle]
    gradient: Callable[..., Sequence[torch.Tensor]]

    @collective
    def run(self, tensors: Tensors, *arguments: Any) -> Sequence[torch.Tensor]:
        """Return the results of a group of tensors, differentiably."""
        require_tensors(tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            results: tuple[torch.Tensor, ...]
            results = _Recorded.apply(self, arguments, *tensors)  # type: ignore[no-untyped-call]
            return results
        outputs: Sequence[torch.Tensor] = self.prepare(tensors, *arguments).run()
        return outputs


@collective
def run_compressed(
    verb: Verb, tensors: Tensors, compression: type[Compressor], *arguments: Any
) -> list[torch.Tensor]:
    """Return the results of a group of tensors, which are rounded before, differentiably."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outputs = verb.run([tensor for tensor, _ in pairs], *arguments)
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, pairs, strict=True)
    ]


class _Recorded(torch.autograd.Function):
    """An operation that autograd records, with its arguments and the shapes of its tensors."""

    @staticmethod
    def forward(
        ctx: Any, verb: Verb, arguments: tuple[Any, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.verb, ctx.arguments = verb, arguments
        ctx.shapes = [tensor.shape for tensor in tensors]
        outputs = tuple(verb.prepare(tensors, *arguments).run())
        ctx.counts = outputs[len(tensors) :]  # what alltoall received from each rank
        ctx.mark_non_differentiable(*ctx.counts)
        return outputs

    @staticmethod
    @collective
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.verb.gradient(gradients, ctx, *ctx.arguments)
