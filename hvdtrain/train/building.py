"""What a run and an evaluation begin with: the world, the recipe, and its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from hvdtrain.core import context
from hvdtrain.core.context import Context
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.data.dataset import is_stream
from hvdtrain.devices import require_own_devices
from hvdtrain.errors import UsageError
from hvdtrain.train.framework import choose_framework
from hvdtrain.train.loop.agree import call_everywhere, require_same_options
from hvdtrain.train.loop.course import Course
from hvdtrain.train.loop.protocol import Framework, Loop
from hvdtrain.train.metrics.improvement import require_known
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.recipe import Recipe
from hvdtrain.train.recipes.recipe_file import load_recipe
from hvdtrain.train.resumption import Resumption
from hvdtrain.train.start import Start

__all__ = ["Built", "Make", "build"]

Make = Callable[[], Recipe]


@dataclass(frozen=True)
class Built:
    """A model that is ready, equal on all ranks.

    Attributes:
        title: of the framework.
        world: the ranks.
        recipe: of this rank.
        course: its steps.
        devices: that of each rank, for people.
        threads: that each rank computes with; None: not known.
        loop: the model in training.
        start: what a checkpoint has brought; of rank 0, on every rank.
    """

    title: str
    world: Context
    recipe: Recipe
    course: Course
    devices: list[str]
    threads: tuple[int | None, ...]
    loop: Loop
    start: Start

    @property
    def test_samples(self) -> int:
        """How many samples are evaluated."""
        return 0 if self.recipe.test is None else len(self.recipe.test)


def build(options: TrainOptions, make: Make | None, resumption: Resumption) -> Built:
    """Join the world, build the recipe, and load the checkpoint (collective).

    Args:
        options: the same on every rank.
        make: the recipe; None: the one that the options name.
        resumption: what to load, and where results go.

    Raises:
        UsageError: on every rank, the options differ between ranks, or do not fit the world, the
            data, the checkpoint or the directory.
    """
    framework = choose_framework(options)
    engine = None if options.engine == "auto" else options.engine
    context.init(engine, deterministic=options.virtual_shards is not None)
    world = context.current()
    require_same_options(options)
    _require_usable_lr(options, world.topology.size)
    recipe, devices, threads = _prepare(options, make, framework, world)
    course = _course(options, recipe, world)
    facts = call_on_root(partial(resumption.find, framework.tensors))
    facts.prepare(world, framework)
    loop = framework.make_loop(recipe, course)
    _require_judged(options, recipe, loop)
    start = call_on_root(partial(resumption.begin, course.samples, loop.state))
    facts.apply(loop, world)
    loop.broadcast()
    return Built(framework.title, world, recipe, course, devices, threads, loop, start)


def _prepare(
    options: TrainOptions, make: Make | None, framework: Framework, world: Context
) -> tuple[Recipe, list[str], tuple[int | None, ...]]:
    """Build the recipe on this rank's device; return it, and devices and threads of all ranks."""
    topology = world.topology
    if make is None:
        make = call_everywhere(partial(load_recipe, options))
    call_everywhere(partial(framework.prepare, topology))
    recipe = call_everywhere(partial(framework.build, make, topology))
    places = allgather_object((framework.device(), framework.threads()), "device")
    devices = [device for device, _ in places]
    if not options.share_gpus:
        require_own_devices(devices)
    names = [device.name for device in devices]
    return recipe, names, tuple(threads for _, threads in places)


def _course(options: TrainOptions, recipe: Recipe, world: Context) -> Course:
    """Return the steps of a run.

    Raises:
        UsageError: there are more ranks than samples, or nobody knows how many there are.
    """
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
            f"{size} ranks, but {options.recipe} has {samples} training samples: start at most "
            "one rank per sample"
        )
    return Course(options, world.topology, samples, shuffled=not stream)


def _require_judged(options: TrainOptions, recipe: Recipe, loop: Loop) -> None:
    """Refuse options about evaluations that there will not be."""
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


def _require_usable_lr(options: TrainOptions, size: int) -> None:
    # Adam divides its rate by 0.1 in the first step.
    largest = float(np.finfo(options.dtype).max) / 16
    rate = options.scaled_lr(size)
    if not rate <= largest:
        raise UsageError(
            f"--lr {options.base_lr:g} is {rate:g} when scaled for {size} ranks, too large for "
            f"--dtype {options.dtype}: give a smaller one"
        )
