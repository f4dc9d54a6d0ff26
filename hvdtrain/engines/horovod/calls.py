"""Calls to the installed Horovod, under names unique to one communicator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.errors import HvdtrainError


@dataclass
class HorovodProcess:
    """Horovod as this process has initialized it; shared by all of its communicators."""

    hvd: Any
    abort: Callable[[int], None]
    sets: dict[tuple[int, ...], Any]


class HorovodCalls:
    """Starts operations in one process set.

    Horovod matches operations by name. Members number theirs identically, because they call them in
    the same order, and the prefix is unique.
    """

    def __init__(self, hvd: Any, process_set: Any, prefix: str) -> None:
        self._hvd = hvd
        self._set = process_set
        self._prefix = prefix
        self._count = 0

    def start(self, operation: str, tensor: torch.Tensor, **how: object) -> int:
        """Call an asynchronous operation of horovod.torch and return its handle."""
        name = f"{self._prefix}:{self._count}"
        self._count += 1
        call = getattr(self._hvd, operation)
        try:
            handle: int = call(tensor, name=name, process_set=self._set, **how)
        except self._hvd.HorovodInternalError as error:
            raise _own(error) from error
        return handle

    def is_done(self, handle: int) -> bool:
        """Return whether `finish` would return at once."""
        return bool(self._hvd.poll(handle))

    def finish(self, handle: int) -> Any:
        """Wait for an operation and return its result."""
        try:
            return self._hvd.synchronize(handle)
        except self._hvd.HorovodInternalError as error:
            raise _own(error) from error

    def run(self, operation: str, tensor: torch.Tensor, **how: object) -> Any:
        """Start an operation, wait for it and return its result."""
        return self.finish(self.start(operation, tensor, **how))


def _own(error: Exception) -> HvdtrainError:
    return HvdtrainError(f"engine horovod: {error}")
