"""The training toolkit: recipes, loops, schedules, checkpoints and progress."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.train.callbacks import (
        Callback,
        CallbackState,
        LearningRateMonitor,
        RestoreBestWeights,
    )
    from hvdtrain.train.find import FoundBatchSize, FoundLr
    from hvdtrain.train.recipe import Recipe
    from hvdtrain.train.session import find_batch_size, find_lr, fit

__all__ = [
    "Callback",
    "CallbackState",
    "FoundBatchSize",
    "FoundLr",
    "LearningRateMonitor",
    "Recipe",
    "RestoreBestWeights",
    "find_batch_size",
    "find_lr",
    "fit",
]

_MODULES = {
    "Callback": "callbacks",
    "CallbackState": "callbacks",
    "FoundBatchSize": "find",
    "FoundLr": "find",
    "LearningRateMonitor": "callbacks",
    "Recipe": "recipe",
    "RestoreBestWeights": "callbacks",
    "find_batch_size": "session",
    "find_lr": "session",
    "fit": "session",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
