"""Handles of operations in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.operations import Submission
from hvdtrain.torch.tensors.buffers import require_tensors
from hvdtrain.torch.tensors.dynamo import disable_compile

__all__ = ["Handle", "StartedHandle", "needs_gradient", "poll", "synchronize"]


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
