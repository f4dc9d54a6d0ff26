"""Training with Keras on its backends tensorflow, torch and jax."""

from __future__ import annotations

from collections.abc import Callable

import keras

from hvdtrain.collective import collective
from hvdtrain.data.sampling import seed_generators
from hvdtrain.devices import Device
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.keras.device import prepare
from hvdtrain.train.keras.fit import require_adding_metrics
from hvdtrain.train.keras.loop import KerasLoop
from hvdtrain.train.keras.served_loop import ServedKerasLoop
from hvdtrain.train.loop.protocol import Framework
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe


class KerasFramework(Framework):
    """Trains with `compile` and `fit` of Keras."""

    tensor_library = "np"

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self._backend = keras.backend.backend()
        if options.backend not in (None, self._backend):
            raise UsageError(
                f"--backend {options.backend}: Keras is already imported, with backend "
                f"{self._backend}: set KERAS_BACKEND={options.backend} before it is imported"
            )
        self._device = Device("")
        self.title = f"keras on {self._backend}"

    def prepare(self, topology: Topology) -> None:
        self._device = prepare(self._backend, topology, self._options)

    def build(self, make_recipe: Callable[[], Recipe], topology: Topology) -> Recipe:
        return build_recipe(make_recipe, self._options, topology)

    def device(self) -> Device:
        return self._device

    @collective
    def make_loop(self, recipe: Recipe, step_plan: StepPlan) -> KerasLoop:
        server = self._options.parameter_server
        if server is not None:
            return ServedKerasLoop(recipe, step_plan, server)
        return KerasLoop(recipe, step_plan)


_LARGEST_SEED = 2**32


def build_recipe(
    make_recipe: Callable[[], Recipe], options: TrainOptions, topology: Topology
) -> Recipe:
    """Call a recipe with this rank's random generators seeded, and check it."""
    # Checkpoints identify variables by paths, which contain a count of the process's layers.
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(options.dtype)
    policy = "mixed_bfloat16" if options.amp == "bf16" else options.dtype
    keras.config.set_dtype_policy(policy)
    seed = options.seed + topology.rank
    keras.utils.set_random_seed(seed % _LARGEST_SEED)
    seed_generators(seed)
    recipe = make_recipe()
    wanted = {"model": keras.Model, "loss": keras.losses.Loss}
    for part, kind in wanted.items():
        found = getattr(recipe, part)
        if not isinstance(found, kind):
            raise UsageError(
                f"the {part} of {options.recipe} is a {type(found).__name__}, not a "
                f"keras.{kind.__name__}: for a {part} of torch, add --framework torch"
            )
    require_adding_metrics(recipe.metrics)
    return recipe
