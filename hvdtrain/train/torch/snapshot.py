"""A copy of tensors that is made while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.train.checkpoint.tree import join

__all__ = ["TorchSnapshot", "copy_tensor"]


class TorchSnapshot:
    """What a state was at one moment.

    Args:
        skeleton: of tree.split().
        copies: its tensors, by name.
        waiting: those that are to be copied yet, and from where.
    """

    def __init__(
        self,
        skeleton: Any,
        copies: Mapping[str, torch.Tensor],
        waiting: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._skeleton, self._copies, self._waiting = skeleton, dict(copies), waiting
        self._lock = threading.Lock()

    def complete(self) -> None:
        """Copy what is missing, or wait for the thread that does."""
        with self._lock:
            while self._waiting:
                copy_tensor(*self._waiting[-1])
                self._waiting.pop()

    def content(self) -> dict[str, Any]:
        """Return it; blocks until it is complete."""
        self.complete()
        content: dict[str, Any] = join(self._skeleton, self._copies)
        return content


def copy_tensor(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into memory in one piece (local); waits for a device."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        # torch would start threads of its own for a thread that it does not know.
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        copy.reshape(-1).view(torch.uint8).numpy()[:] = flat.numpy()
    else:
        copy.copy_(tensor.detach())
