"""Calls to the installed Horovod under names of one communicator's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.errors import HvdtrainError

__all__ = ["HorovodCalls", "HorovodProcess"]


@dataclass
class HorovodProcess:
    """Horovod as this process has initialised it; shared by all of its communicators.

    Attributes:
        hvd: the module horovod.torch.
        abort: ends every rank with an exit code.
        sets: the process sets that there are, by their ranks in ascending order. They are the
            same on all ranks, members or not, and stay until the end: Horovod removes one only
            when the whole world asks for it.
    """

    hvd: Any
    abort: Callable[[int], None]
    sets: dict[tuple[int, ...], Any]


class HorovodCalls:
    """Starts operations in one process set.

    Horovod pairs operations by name: members number theirs alike, because they call in one
    order, and nobody else uses the prefix.

    Args:
        hvd: the module horovod.torch.
        process_set: whose ranks take part.
        prefix: of all names, the same on all members.
    """

    def __init__(self, hvd: Any, process_set: Any, prefix: str) -> None:
        self._hvd = hvd
        self._set = process_set
        self._prefix = prefix
        self._count = 0

    def start(self, operation: str, tensor: torch.Tensor, **how: object) -> int:
        """Call horovod.torch's asynchronous `operation` and return its handle."""
        name = f"{self._prefix}:{self._count}"
        self._count += 1
        call = getattr(self._hvd, operation)
        try:
            handle: int = call(tensor, name=name, process_set=self._set, **how)
        except self._hvd.HorovodInternalError as error:
            raise _own(error) from error
        return handle

    def is_done(self, handle: int) -> bool:
        """Tell without blocking whether `finish` would return at once."""
        return bool(self._hvd.poll(handle))

    def finish(self, handle: int) -> Any:
        """Wait for an operation and return what it gives."""
        try:
            return self._hvd.synchronize(handle)
        except self._hvd.HorovodInternalError as error:
            raise _own(error) from error

    def run(self, operation: str, tensor: torch.Tensor, **how: object) -> Any:
        """Start an operation and wait for it."""
        return self.finish(self.start(operation, tensor, **how))


def _own(error: Exception) -> HvdtrainError:
    return HvdtrainError(f"engine horovod: {error}")
