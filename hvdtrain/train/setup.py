"""Set up a run or an evaluation: framework, ranks, recipe, model and checkpoint."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.membership import Context
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.data.dataset import is_stream, selected
from hvdtrain.devices import require_own_devices
from hvdtrain.errors import UsageError
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.gather import call_everywhere, require_same_options
from hvdtrain.train.loop.protocol import Framework, TrainingLoop
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import require_known
from hvdtrain.train.options import BACKENDS, TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipe_loader import load_recipe
from hvdtrain.train.resume import RunState, StateLoader

RecipeFactory = Callable[[], Recipe]


@dataclass(frozen=True)
class TrainingSetup:
    """A model that is ready to train or to evaluate, equal on all ranks."""

    title: str
    world: Context
    recipe: Recipe
    step_plan: StepPlan
    devices: list[str]
    threads: tuple[int | None, ...]
    loop: TrainingLoop
    state: RunState

    @property
    def test_samples(self) -> int:
        return 0 if self.recipe.test is None else len(self.recipe.test)


@collective
def set_up(
    options: TrainOptions,
    make_recipe: RecipeFactory | None,
    loader: StateLoader,
    ranks: int | None = None,
) -> TrainingSetup:
    """Initialize the ranks, build the recipe, and load the checkpoint."""
    framework = choose_framework(options)
    world = join_world(options)
    world.keeps_states = True  # see snapshots
    require_same_options(options)
    _require_servers_fit(options, world)
    _require_usable_lr(options, world.topology.size)
    recipe, devices, threads = _prepare(options, make_recipe, framework, world)
    step_plan = replace(_plan_steps(options, recipe, world), ranks=ranks)
    if options.dry_run or options.overfit:
        recipe = _of_first_batches(options, recipe, step_plan)
        step_plan = replace(_plan_steps(options, recipe, world), ranks=ranks)
    settings = call_on_root(partial(loader.find, framework.tensor_library))
    settings.prepare(world, framework)
    loop = framework.make_loop(recipe, step_plan)
    _require_test_samples(options, recipe, loop)
    state = call_on_root(partial(loader.begin_run, step_plan.samples, loop.state))
    if settings.size == world.topology.size and settings.plan is not None:
        loop.use_bucket_plan(settings.plan)
    loop.broadcast()
    loader.restore_exchange(loop, state.resumed)
    return TrainingSetup(framework.title, world, recipe, step_plan, devices, threads, loop, state)


@collective
def join_world(options: TrainOptions) -> Context:
    """Return the world of ranks, which is joined in the first call."""
    choose_framework(options)
    if options.framework == "torch" and not context.is_initialized():
        # Optimizers import it, which takes seconds, for which ranks that others join would wait.
        import torch._dynamo  # noqa: F401
    engine = None if options.engine == "auto" else options.engine
    context.init(engine, deterministic=options.virtual_shards is not None)
    return context.current()


@collective
def _prepare(
    options: TrainOptions, make_recipe: RecipeFactory | None, framework: Framework, world: Context
) -> tuple[Recipe, list[str], tuple[int | None, ...]]:
    """Build the recipe on this rank's device."""
    topology = world.topology
    if make_recipe is None:
        make_recipe = call_everywhere(partial(load_recipe, options))
    call_everywhere(partial(framework.prepare, topology))
    recipe = call_everywhere(partial(framework.build, make_recipe, topology))
    gathered = allgather_object((framework.device(), framework.threads()), "device")
    devices = [device for device, _ in gathered]
    if not options.share_gpus:
        require_own_devices(devices)
    names = [device.name for device in devices]
    return recipe, names, tuple(threads for _, threads in gathered)


def _plan_steps(options: TrainOptions, recipe: Recipe, world: Context) -> StepPlan:
    size, stream, test = world.topology.size, is_stream(recipe.train), recipe.test
    if test is not None and (is_stream(test) or not hasattr(test, "__len__") or not len(test)):
        raise UsageError(
            f"the test data of {options.recipe}, a {type(test).__name__}, must have at least one "
            "sample, len() and [index]: give such, or None"
        )
    if stream and recipe.samples_per_epoch is None:
        raise UsageError(
            f"the training data of {options.recipe} is a stream ({type(recipe.train).__name__}): "
            "give its Recipe samples_per_epoch"
        )
    if stream and options.workers:
        raise UsageError(
            f"--workers {options.workers}: the training data of {options.recipe} is a stream, "
            "which each rank reads by itself: leave it out"
        )
    samples = recipe.samples_per_epoch or len(recipe.train)
    if size > samples:
        raise UsageError(
            f"{size} ranks, but {options.recipe} has {counted(samples, 'training sample')}: start "
            "at most one rank per sample"
        )
    return StepPlan(options, world.topology, samples, shuffled=not stream)


@collective
def _of_first_batches(options: TrainOptions, recipe: Recipe, plan: StepPlan) -> Recipe:
    """Return a recipe with the data that --dry-run or --overfit asks for."""
    batches = options.dry_run or options.overfit or 0
    count = min(batches * plan.global_batch_size, plan.samples)
    train, test, stream = recipe.train, recipe.test, is_stream(recipe.train)
    if not stream:
        train = selected(train, plan.order(0)[:count])
    elif options.overfit:
        # Each rank would draw other random numbers while reading.
        train, stream = call_on_root(lambda: list(islice(train, count))), False
    if options.overfit:
        test = train
    elif test is not None:
        test = selected(test, np.arange(min(count, len(test))))
    return replace(recipe, train=train, test=test, samples_per_epoch=count if stream else None)


def _require_test_samples(options: TrainOptions, recipe: Recipe, loop: TrainingLoop) -> None:
    """Refuse options about evaluations if the recipe has no test samples."""
    if recipe.test is None:
        for label, value, default in (
            ("--early-stop", options.early_stop, None),
            ("--best", options.best, "loss"),
        ):
            if value != default:
                raise UsageError(
                    f"{label} {value}: {options.recipe} has no test samples to judge by: give its "
                    f"Recipe test, or leave {label} out"
                )
    else:
        require_known(options.best, loop.test_metrics)


def _require_servers_fit(options: TrainOptions, world: Context) -> None:
    """Refuse a parameter server that the ranks or their engine cannot be."""
    server, size = options.parameter_server, world.topology.size
    if server is None:
        return
    if size <= server.servers:
        raise UsageError(
            f"--strategy {options.strategy} needs {server.servers + 1} ranks or more, "
            f"{server.servers} of them as servers, got {size}"
        )
    if server.backup >= size - server.servers:
        raise UsageError(
            f"--strategy {options.strategy}: backup must be less than the number of workers, "
            f"{size - server.servers} of {size} ranks"
        )
    if not world.world.communicator.capabilities.point_to_point:
        raise UsageError(
            f"--strategy {options.strategy} needs messages between two ranks, which engine "
            f"{world.engine_name} has not: give --engine mpi"
        )


def _require_usable_lr(options: TrainOptions, size: int) -> None:
    # Adam divides the learning rate by 0.1 in the first step.
    largest = float(np.finfo(options.dtype).max) / 16
    rate = options.scaled_lr(size)
    if not rate <= largest:
        raise UsageError(
            f"--lr {options.base_lr:g} is {rate:g} when scaled for {size} ranks, too large for "
            f"--dtype {options.dtype}: give a smaller one"
        )


_INSTALL = {
    "torch": "'hvdtrain[torch]'",
    "tensorflow": "'hvdtrain[tensorflow]'",
    "keras": "'hvdtrain[keras]'",
    "jax": "jax",
}


def choose_framework(options: TrainOptions) -> Framework:
    """Import the framework and return it; Keras's backend is set before Keras is imported."""
    try:
        framework = _import_framework(options)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _INSTALL:
            raise
        raise UsageError(f"{missing} is not installed: pip install {_INSTALL[missing]}") from error
    try:
        # Not needed to write checkpoints, but to read them: a run could not be resumed.
        importlib.import_module("safetensors")
    except ModuleNotFoundError as error:
        raise UsageError(
            "safetensors, which reads checkpoints, is not installed: pip install safetensors"
        ) from error
    return framework


def _import_framework(options: TrainOptions) -> Framework:
    # The framework itself comes first, so that the error names it if it is missing.
    if options.framework == "torch":
        import torch  # noqa: F401

        from hvdtrain.train.torch.framework import TorchFramework

        return TorchFramework(options)
    backend = options.backend or os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend not in BACKENDS:
        raise UsageError(
            f"unknown KERAS_BACKEND {backend!r}: choose from {', '.join(BACKENDS)} with --backend"
        )
    os.environ["KERAS_BACKEND"] = backend
    import keras  # noqa: F401

    from hvdtrain.train.keras.framework import KerasFramework

    return KerasFramework(options)
