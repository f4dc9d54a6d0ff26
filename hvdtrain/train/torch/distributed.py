"""The optimizer of a run with torch."""

from __future__ import annotations

import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.errors import UsageError
from hvdtrain.torch.sharding.fused_update import shares_exactly
from hvdtrain.train.optimizers.layerwise import torch_optimizer
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.recipe import Recipe


def plain_optimizer(
    recipe: Recipe, model: torch.nn.Module, options: TrainOptions
) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe or of the options."""
    if recipe.optimizer is None:
        return torch_optimizer(options, model.parameters(), options.base_lr)
    own: torch.optim.Optimizer = recipe.optimizer(model.parameters(), options.base_lr)
    return own


@collective
def distributed_optimizer(
    recipe: Recipe, model: torch.nn.Module, options: TrainOptions
) -> hvd.DistributedOptimizer:
    """Return the optimizer of a recipe or of the options, distributed."""
    own = plain_optimizer(recipe, model, options)
    op = hvd.Average if options.virtual_shards is None else hvd.Sum
    exchange, sharded = options.make_exchange(), options.shard_optimizer
    if sharded is None:
        sharded = _may_share(options) and shares_exactly(own, "sharing the optimizer's work")
    try:
        return hvd.DistributedOptimizer(
            own,
            model.named_parameters(),
            op=op,
            exchange=exchange,
            sharded=sharded,
        )
    except ValueError as error:
        if options.shard_optimizer:
            raise UsageError(f"--shard-optimizer: {error}") from error
        if exchange is None:
            raise
        raise UsageError(f"--exchange {options.exchange}: {error}") from error


def _may_share(options: TrainOptions) -> bool:
    """Return whether it is free to share the optimizer's work, and has the same results."""
    if context.current().failures is not None:  # steps would be taken again when ranks are lost
        return False
    plain = options.make_exchange() is None and options.virtual_shards is None
    # The squares of a norm are summed in another order, and fp16 needs whole gradients.
    return plain and options.clip_norm is None and options.amp != "fp16"
