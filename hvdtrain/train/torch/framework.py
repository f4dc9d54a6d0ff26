"""The main job with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from hvdtrain.data.sampling.seeds import seed_generators
from hvdtrain.devices import Device
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.torch.shards import own_shards
from hvdtrain.train.loop.course import Course
from hvdtrain.train.loop.threads import threads_are_given
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.recipe import Recipe
from hvdtrain.train.torch.loop import TorchLoop
from hvdtrain.train.torch.place import limit_threads, place_of, take_device

__all__ = ["TorchFramework"]


class TorchFramework:
    """Trains with torch; gradients are reduced beside the backward pass.

    Args:
        options: of the run.
    """

    title = "torch"
    tensors: Literal["pt"] = "pt"

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._device = torch.device("cpu")

    def prepare(self, topology: Topology) -> None:
        """Pin one GPU per local rank or take a share of the cores (local).

        Raises:
            UsageError: there is no such device, or virtual shards do not fit the world.
        """
        shards = self._options.virtual_shards
        if shards is not None:
            own_shards(shards)
        self._device = take_device(topology, self._options)
        if shards is not None:  # the gradient of a shard depends on the number of threads
            limit_threads(1)

    def build(self, make: Callable[[], Recipe], topology: Topology) -> Recipe:
        """Call a recipe with this rank's random generators seeded, and check it (local).

        Raises:
            UsageError: its model is none of torch's.
        """
        # Rank 0's weights are the ones that count: others start elsewhere, so that a broadcast
        # that went wrong shows in the digests.
        seed_generators(self._options.seed + topology.rank)
        recipe = make()
        if not isinstance(recipe.model, torch.nn.Module):
            raise UsageError(
                f"the model of {self._options.recipe} is a {type(recipe.model).__name__}, not a "
                "torch.nn.Module: add --framework keras where it is one of Keras"
            )
        if recipe.most_threads is not None:
            limit_threads(recipe.most_threads)
        return recipe

    def device(self) -> Device:
        """Tell what this rank computes on, after build() (local)."""
        return place_of(self._device)

    def threads(self) -> int | None:
        """Return how many threads this rank computes with (local)."""
        return torch.get_num_threads()

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads, unless the user has set how many (local)."""
        if not threads_are_given():
            torch.set_num_threads(threads)

    def make_loop(self, recipe: Recipe, course: Course) -> TorchLoop:
        """Prepare the optimizer (collective)."""
        return TorchLoop(recipe, course, self._device)
