"""The options of a training run."""

from __future__ import annotations

from hvdtrain.train.options.declare import Option
from hvdtrain.train.options.table import (
    BACKENDS,
    DEFAULT_LR,
    DTYPES,
    FRAMEWORKS,
    OPTIONS,
    RECIPES,
    RUNS,
    key_of_name_elsewhere,
)
from hvdtrain.train.options.train_options import TrainOptions

__all__ = [
    "BACKENDS",
    "DEFAULT_LR",
    "DTYPES",
    "FRAMEWORKS",
    "OPTIONS",
    "RECIPES",
    "RUNS",
    "Option",
    "TrainOptions",
    "key_of_name_elsewhere",
]
