"""The factor of the loss, which a loss scaler changes from step to step."""

from __future__ import annotations

import torch


class LossScale:
    """The factor of the loss."""

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None

    def __call__(self) -> float:
        """Return the factor; 1 without a loss scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())
