"""The options of a training run: one file for each topic."""

from __future__ import annotations

from hvdtrain.train.optimizers.choice import OPTIMIZERS
from hvdtrain.train.options.data import DEFAULT_BATCH_SIZE
from hvdtrain.train.options.declare import Option
from hvdtrain.train.options.devices import DEVICES, ENGINES
from hvdtrain.train.options.optimisation import DEFAULT_LR, SGD_MOMENTUM
from hvdtrain.train.options.precision import DTYPES
from hvdtrain.train.options.saving import RUNS
from hvdtrain.train.options.task import BACKENDS, FRAMEWORKS, RECIPES
from hvdtrain.train.options.train_options import OPTIONS, TrainOptions

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
