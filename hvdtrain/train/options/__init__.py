"""The options of a training run: one file for each topic."""

from __future__ import annotations

from hvdtrain.train.optimizers.schedule import OPTIMIZERS
from hvdtrain.train.options.declare import Option
from hvdtrain.train.options.running import (
    BACKENDS,
    DEFAULT_BATCH_SIZE,
    DEVICES,
    ENGINES,
    FRAMEWORKS,
    RECIPES,
    RUNS,
)
from hvdtrain.train.options.train_options import (
    DEFAULT_LR,
    DTYPES,
    OPTIONS,
    SGD_MOMENTUM,
    TrainOptions,
)

__all__ = [
    "BACKENDS",
    "DEFAULT_BATCH_SIZE",
    "DEFAULT_LR",
    "DEVICES",
    "DTYPES",
    "ENGINES",
    "FRAMEWORKS",
    "OPTIMIZERS",
    "OPTIONS",
    "RECIPES",
    "RUNS",
    "SGD_MOMENTUM",
    "Option",
    "TrainOptions",
]
