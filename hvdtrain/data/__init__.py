"""Data sets, exact sharding and seeds. Imports no framework, and nothing before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdtrain.data.augment import center_crop, random_crop, random_flip
    from hvdtrain.data.dataset import Dataset, Samples
    from hvdtrain.data.sampling import (
        EvaluationSampler,
        GlobalBatchSampler,
        StreamBatches,
        sample_generator,
        sample_seed,
        seed_generators,
        step_seed,
    )

__all__ = [
    "Dataset",
    "EvaluationSampler",
    "GlobalBatchSampler",
    "Samples",
    "StreamBatches",
    "center_crop",
    "random_crop",
    "random_flip",
    "sample_generator",
    "sample_seed",
    "seed_generators",
    "step_seed",
]

_MODULES = {
    **dict.fromkeys(["Dataset", "Samples"], "dataset"),
    **dict.fromkeys(["center_crop", "random_crop", "random_flip"], "augment"),
    **dict.fromkeys(["EvaluationSampler", "GlobalBatchSampler", "StreamBatches"], "sampling"),
    **dict.fromkeys(
        ["sample_generator", "sample_seed", "seed_generators", "step_seed"], "sampling"
    ),
}


def __getattr__(name: str) -> Any:
    """Import the module of a name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
