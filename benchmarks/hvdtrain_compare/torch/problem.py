"""The recipe of a comparison, ready to be wrapped by a strategy for torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hvdtrain.data.dataset import is_stream
from hvdtrain.data.sampling import seed_generators
from hvdtrain.devices import thread_share
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe_loader import load_recipe
from hvdtrain.train.recipes.recipe import Recipe
from hvdtrain.train.torch.device import limit_threads, move_to
from hvdtrain.train.torch.sources import Source, make_source
from hvdtrain.train.torch.update import plain_optimizer
from hvdtrain_compare.protocol import Place, Task


@dataclass(frozen=True)
class Problem:
    """What is trained, the same for every strategy."""

    place: Place
    ranks: int
    variant: str
    recipe: Recipe
    plan: StepPlan
    options: TrainOptions

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        model: torch.nn.Module = self.recipe.model
        return model

    @property
    def batch(self) -> int:
        """Samples of all ranks per step."""
        return self.plan.global_batch_size

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the recipe or of the options for a model."""
        return plain_optimizer(self.recipe, model, self.options)

    def train_source(self) -> Source:
        """Return what reads the training samples."""
        return self._source(self.recipe.train, self.recipe.augment)

    def test_source(self) -> Source:
        """Return what reads the test samples."""
        return self._source(self.recipe.test, None)

    def _source(self, data: Any, augment: Any) -> Source:
        move = partial(move_to, device=torch.device("cpu"), dtype=_dtype(self.options))
        return make_source(data, move, self.options.seed, 0, augment, self.recipe.collate)


def make_problem(task: Task, place: Place) -> Problem:
    """Build the recipe on the CPU, with the same seed on every rank."""
    options = task.train_options
    host = socket.gethostname()
    here = Topology.from_nodes(place.rank, [0] * place.size, [host] * place.size)
    threads = thread_share(here)
    if threads is not None:
        torch.set_num_threads(threads)
    make_recipe = load_recipe(options)
    seed_generators(options.seed)
    recipe = make_recipe()
    _require_comparable(options.recipe, recipe)
    if recipe.most_threads is not None:
        limit_threads(recipe.most_threads)
    recipe.model.to("cpu", _dtype(options))
    samples = recipe.samples_per_epoch or len(recipe.train)
    plan = StepPlan(options, here, samples, ranks=task.ranks)
    if plan.global_batch_size % task.ranks:
        raise UsageError(
            f"a batch of {plan.global_batch_size} samples cannot be divided by {task.ranks} ranks, "
            "which DistributedSampler needs: give a multiple"
        )
    return Problem(place, task.ranks, task.variant, recipe, plan, options)


def _require_comparable(name: str, recipe: Recipe) -> None:
    if not isinstance(recipe.model, torch.nn.Module):
        raise UsageError(
            f"the model of {name} is a {type(recipe.model).__name__}, not a torch.nn.Module"
        )
    if is_stream(recipe.train):
        raise UsageError(
            f"the training data of {name} is a stream, which DistributedSampler cannot divide: "
            "compare recipes whose data has len() and [index]"
        )


def _dtype(options: TrainOptions) -> torch.dtype:
    found: torch.dtype = getattr(torch, options.dtype)
    return found
