"""Calls to the installed Horovod, under names unique to one communicator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.errors import HvdtrainError

__all__ = ["HorovodCalls", "HorovodProcess"]


@dataclass
class HorovodProcess:
    """Horovod as this process has initialized it; shared by all of its communicators.

    Attributes:
        hvd: module horovod.torch.
        abort: function that ends every rank with an exit code.
        sets: existing process sets, by their ranks in ascending order. They are the same on all
            ranks and are never removed, which would be collective over the world.
    """

    hvd: Any
    abort: Callable[[int], None]
    sets: dict[tuple[int, ...], Any]


class HorovodCalls:
    """Starts operations in one process set.

    Horovod matches operations by name. Members number theirs identically, because they call them in
    the same order, and the prefix is unique.

    Args:
        hvd: module horovod.torch.
        process_set: process set of the members.
        prefix: prefix of all names, equal on all members.
    """

    def __init__(self, hvd: Any, process_set: Any, prefix: str) -> None:
        self._hvd = hvd
        self._set = process_set
        self._prefix = prefix
        self._count = 0

    def start(self, operation: str, tensor: torch.Tensor, **how: object) -> int:
        """Call an asynchronous operation of horovod.torch and return its handle.

        Args:
            operation: name of the function.
            tensor: tensor to communicate.
            how: further arguments of the function.

        Raises:
            HvdtrainError: Horovod reports an error.
        """
        name = f"{self._prefix}:{self._count}"
        self._count += 1
        call = getattr(self._hvd, operation)
        try:
            handle: int = call(tensor, name=name, process_set=self._set, **how)
        except self._hvd.HorovodInternalError as error:
            raise _own(error) from error
        return handle

    def is_done(self, handle: int) -> bool:
        """Return whether `finish` would return at once (local)."""
        return bool(self._hvd.poll(handle))

    def finish(self, handle: int) -> Any:
        """Wait for an operation and return its result.

        Raises:
            HvdtrainError: Horovod reports an error.
        """
        try:
            return self._hvd.synchronize(handle)
        except self._hvd.HorovodInternalError as error:
            raise _own(error) from error

    def run(self, operation: str, tensor: torch.Tensor, **how: object) -> Any:
        """Start an operation, wait for it and return its result.

        Args:
            operation, tensor, how: as in `start`.
        """
        return self.finish(self.start(operation, tensor, **how))


def _own(error: Exception) -> HvdtrainError:
    return HvdtrainError(f"engine horovod: {error}")
