"""Mixed precision with torch: where operations run in a half type, and how losses are scaled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["AMP", "Precision"]

AMP = ("none", "bf16", "fp16")

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The types of one rank's operations; weights, gradients and optimizer keep theirs.

    Args:
        amp: one of AMP.
        device: where the model is.

    Attributes:
        scaler: multiplies losses, so that gradients do not vanish in float16; None but for fp16.
        losses: that it has multiplied since clear() was called on them.
    """

    def __init__(self, amp: str, device: torch.device) -> None:
        self._device, self._type = device.type, _TYPES.get(amp)
        self.scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
        self.losses: list[torch.Tensor] = []

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass and its loss, but not for backward."""
        if self._type is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._type)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward() on."""
        if self.scaler is None:
            return loss
        self.losses.append(loss.detach())
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled
