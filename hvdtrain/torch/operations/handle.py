"""Operations under way, as PyTorch users hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.core.operations import Submission
from hvdtrain.torch.tensors.compiling import uncompiled

__all__ = ["Handle", "poll", "synchronize"]


class Handle:
    """An operation on tensors, which start() submits and wait() completes.

    Args:
        submitted: the operation.
        finish: makes the user's result from the operation's.
    """

    def __init__(self, submitted: Submission, finish: Callable[[Any], Any]) -> None:
        self._submitted = submitted
        self._finish: Callable[[Any], Any] | None = finish
        self._started = False
        self._output: Any = None

    def start(self) -> Handle:
        """Submit the operation and return at once (collective, in any order)."""
        self._submitted.start()
        self._started = True
        return self

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """Have wait() return change(its result)."""
        finish = self._finish
        if finish is not None:
            self._finish = lambda result: change(finish(result))
        return self

    def first(self) -> Handle:
        """Have wait() return the first of its results only."""
        return self.then(lambda results: results[0])

    def done(self) -> bool:
        """Return whether wait() would return at once (local)."""
        return self._submitted.done()

    @uncompiled
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


@uncompiled
def poll(handle: Handle) -> bool:
    """Return whether synchronize() would return at once (local)."""
    return _checked(handle).done()


@uncompiled
def synchronize(handle: Handle | None) -> Any:
    """Block until an asynchronous operation is complete; return its result or raise its error.

    A result may be asked for again. None, which stands for no operation, gives None.
    """
    return None if handle is None else _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"expected the handle that an operation ending in _async returned, got {handle!r}"
        )
    return handle
