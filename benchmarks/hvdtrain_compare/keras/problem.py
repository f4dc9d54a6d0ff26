"""The recipe of a comparison with Keras, with the same first weights for every strategy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.data.sampling import Indices, seed_generators
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.topology import Topology
from hvdtrain.train.keras.fit import SampleReader, StepPlanSchedule, plain_optimizer
from hvdtrain.train.keras.metrics import sum_over_samples
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe_loader import load_recipe
from hvdtrain.train.recipes.recipe import Recipe
from hvdtrain_compare.keras.approach import Approach
from hvdtrain_compare.protocol.rank_file import Weights
from hvdtrain_compare.protocol.task import Place, Task

# numpy takes 32 bits.
_SEEDS = 2**32
_FIRST_WEIGHTS = "first_weights.npz"


@dataclass(frozen=True)
class Problem:
    """What is trained, the same for every strategy."""

    place: Place
    recipe: Recipe
    plan: StepPlan
    options: TrainOptions

    @property
    def rows(self) -> int:
        """Samples in each batch of this process, padding included."""
        return -(-self.plan.global_batch_size // self.place.size)

    def read(self, data: Any, rows: Indices, epoch: int = 0) -> tuple[Any, Any]:
        """Return the inputs and targets of samples."""
        augment = self.recipe.augment if data is self.recipe.train else None
        reader = SampleReader(data, self.options.dtype, self.options.seed, augment)
        return reader.read(rows, epoch)


def make_problem(task: Task, place: Place, approach: Approach) -> Problem:
    """Build and compile the recipe."""
    options = task.train_options
    alone = Topology.from_nodes(0, [0], ["localhost"])
    make_recipe = load_recipe(options)
    keras.config.set_floatx(options.dtype)
    keras.config.set_dtype_policy(options.dtype)
    keras.utils.set_random_seed(options.seed % _SEEDS)
    seed_generators(options.seed)
    with approach.scope():
        recipe = make_recipe()
        _require_keras(options.recipe, recipe)
        samples = recipe.samples_per_epoch or len(recipe.train)
        plan = StepPlan(options, alone, samples, ranks=task.ranks)
        _set_first_weights(recipe.model, Path(task.shared) / _FIRST_WEIGHTS, place)
        optimizer = approach.optimizer(plain_optimizer(recipe, options, StepPlanSchedule(plan)))
        recipe.model.compile(optimizer, sum_over_samples(recipe.loss))
    return Problem(place, recipe, plan, options)


def _require_keras(name: str, recipe: Recipe) -> None:
    for part, kind in (("model", keras.Model), ("loss", keras.losses.Loss)):
        found = getattr(recipe, part)
        if not isinstance(found, kind):
            raise UsageError(
                f"the {part} of {name} is a {type(found).__name__}, not a keras.{kind.__name__}"
            )


def _set_first_weights(model: Any, path: Path, place: Place) -> None:
    """Take the weights that the reference has written; the reference, which is first, writes them.

    Backends of Keras draw different numbers from the same seed.
    """
    if path.exists():
        with np.load(path) as file:
            model.set_weights([file[name] for name in file.files])
    elif place.rank == 0:
        with replacing(path) as file:
            np.savez(file, *model.get_weights())


def weights_of(model: Any) -> Weights:
    """Return a copy of the weights that are trained, by name."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # within fit, variables are not current
    variables = model.trainable_variables
    return {one.path: np.array(keras.ops.convert_to_numpy(one)) for one in variables}
