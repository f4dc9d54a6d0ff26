"""The main job with torch."""

from __future__ import annotations

import torch

from hvdtrain.data.dataset import Dataset
from hvdtrain.devices import Device
from hvdtrain.topology import Topology
from hvdtrain.torch.shards import own_shards
from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.torch_loop import TorchLoop
from hvdtrain.train.frameworks.torch_place import take_device
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import TorchRecipe, load_recipe

__all__ = ["TorchFramework"]


class TorchFramework:
    """Trains with torch; gradients are reduced beside the backward pass.

    Args:
        options: of the run.
    """

    title = "torch"

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self.recipe: TorchRecipe = load_recipe(options.recipe)
        self._device = torch.device("cpu")

    def prepare(self, topology: Topology) -> Device:
        """Pin one GPU per local rank or take a share of the cores; tell which device (local).

        Raises:
            UsageError: there is no such device, or virtual shards do not fit the world.
        """
        shards = self._options.virtual_shards
        if shards is not None:
            own_shards(shards)
        # The gradient of a shard depends on the number of threads.
        most = 1 if shards is not None else self.recipe.most_threads
        self._device, text = take_device(topology, self._options, most)
        return text

    def make_loop(self, course: Course, data: Dataset) -> TorchLoop:
        """Build the model and its optimizer (collective)."""
        return TorchLoop(self.recipe, course, data, self._device)
