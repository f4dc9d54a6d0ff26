"""The optimizer of a run with Keras, and how each step is weighted by its samples."""

from __future__ import annotations

from typing import Any

import keras

import hvdtrain.keras as hvd
from hvdtrain.core.gradients.exchange import Kind
from hvdtrain.errors import UnsupportedError, UsageError
from hvdtrain.train.keras.fit import counted_samples
from hvdtrain.train.optimizers.make_keras import keras_optimizer
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.recipe import Recipe


def plain_optimizer(
    recipe: Recipe, options: TrainOptions, schedule: keras.optimizers.schedules.LearningRateSchedule
) -> Any:
    """Return the optimizer of a recipe or of the options."""
    if recipe.optimizer is None:
        return keras_optimizer(options, schedule)
    return recipe.optimizer(schedule)


def distributed_optimizer(
    recipe: Recipe, options: TrainOptions, schedule: keras.optimizers.schedules.LearningRateSchedule
) -> Any:
    """Return the optimizer of a recipe or of the options, distributed and built."""
    plain = plain_optimizer(recipe, options, schedule)
    exchange = options.make_exchange()
    try:
        optimizer = hvd.DistributedOptimizer(
            plain, exchange=exchange, sharded=bool(options.shard_optimizer)
        )
    except UnsupportedError as error:
        raise UsageError(f"--shard-optimizer: {error}") from error
    except ValueError as error:
        if exchange is None:
            raise
        raise UsageError(f"--exchange {options.exchange}: {error}") from error
    weights = optimizer.hvdtrain_reduction.weights
    if weights is not None:
        weights.flush_in_fit = False  # a run calls `fit` for a part of an epoch, and flushes itself
    optimizer.build(recipe.model.trainable_variables)
    return optimizer


def sample_scale(optimizer: Any, size: int) -> float | None:
    """Return the factor of sample weights that BatchDataset takes.

    The average over ranks is the gradient of the mean, to which every rank adds the same gradient
    of the regularizers. An exchange of weights takes the gradient of a rank's own mean.
    """
    return None if optimizer.hvdtrain_reduction.settings.weights else float(size)


def compile_model(model: Any, optimizer: Any, loss: Any, sums: keras.metrics.Metric) -> None:
    """Compile the model of a run."""
    model.compile(optimizer, loss, weighted_metrics=[sums])
    exchange = optimizer.hvdtrain_reduction.settings.make_exchange()
    if exchange.kind is Kind.WEIGHTS and exchange.takes_samples:
        optimizer.sample_weight = counted_samples
