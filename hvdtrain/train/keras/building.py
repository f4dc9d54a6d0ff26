"""Recipes whose model is one of Keras."""

from __future__ import annotations

from collections.abc import Callable

import keras

from hvdtrain.data.sampling.seeds import seed_generators
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.keras.metrics import require_adding_metrics
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["build_recipe"]

_LARGEST_SEED = 2**32


def build_recipe(make: Callable[[], Recipe], options: TrainOptions, topology: Topology) -> Recipe:
    """Call a recipe with this rank's random generators seeded, and check it (local).

    Rank 0's weights are the ones that count: others start elsewhere, so that a broadcast that went
    wrong shows in the digests.

    Raises:
        UsageError: its model or its loss is none of Keras, or a metric does not add up.
    """
    # Checkpoints know variables by their paths, which count the layers of a process.
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(options.dtype)
    policy = "mixed_bfloat16" if options.amp == "bf16" else options.dtype
    keras.config.set_dtype_policy(policy)
    seed = options.seed + topology.rank
    keras.utils.set_random_seed(seed % _LARGEST_SEED)
    seed_generators(seed)
    recipe = make()
    wanted = {"model": keras.Model, "loss": keras.losses.Loss}
    for part, kind in wanted.items():
        found = getattr(recipe, part)
        if not isinstance(found, kind):
            raise UsageError(
                f"the {part} of {options.recipe} is a {type(found).__name__}, not a "
                f"keras.{kind.__name__}: add --framework torch where it is one of torch"
            )
    require_adding_metrics(recipe.metrics)
    return recipe
