"""Gradients as numpy arrays, for backends whose tensors all are dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.core.arguments import group_indices
from hvdtrain.keras.settings import GradientSettings
from hvdtrain.tensors.arrays.fused import FusedSettings

__all__ = ["fused_settings"]


def fused_settings(variables: Sequence[Any], settings: GradientSettings) -> FusedSettings:
    """Return how gradients of these variables are reduced in one step."""
    groups = group_indices(settings.groups, variables)
    return FusedSettings(settings.op, settings.process_set, settings.predivide, groups)
