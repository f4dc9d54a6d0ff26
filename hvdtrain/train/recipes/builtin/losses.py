"""The loss of classification recipes, for torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hvdtrain.errors import UsageError


def cross_entropy(label_smoothing: float) -> Callable[..., torch.Tensor]:
    """Return the mean cross entropy of scores [n, classes, ...] and labels [n, ...]."""
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    return partial(torch.nn.functional.cross_entropy, label_smoothing=label_smoothing)
