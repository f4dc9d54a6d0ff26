"""The main job with Keras, on its backends tensorflow, torch and jax."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import keras

from hvdtrain.data.dataset import Dataset
from hvdtrain.devices import Device
from hvdtrain.topology import Topology
from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.keras_loop import KerasLoop
from hvdtrain.train.keras_recipe import KerasRecipe, load_recipe
from hvdtrain.train.options import TrainOptions

__all__ = ["KerasFramework"]


class _Place(Protocol):
    """Where a rank computes, on one of Keras's backends; a module."""

    def prepare(self, topology: Topology, options: TrainOptions, most_threads: int) -> Device:
        """Pin a device or take a share of the cores; tell which device (local)."""


class KerasFramework:
    """Trains with `compile` and `fit`.

    Args:
        options: of the run.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._backend = keras.backend.backend()
        self.title = f"keras on {self._backend}"
        self.recipe: KerasRecipe = load_recipe(options.recipe)

    def prepare(self, topology: Topology) -> Device:
        """Pin one GPU per local rank or take a share of the cores; tell which device (local).

        Raises:
            UsageError: there is no such device.
        """
        module: Any = importlib.import_module(f"hvdtrain.train.frameworks.{self._backend}_place")
        place: _Place = module
        return place.prepare(topology, self._options, self.recipe.most_threads)

    def make_loop(self, course: Course, data: Dataset) -> KerasLoop:
        """Build the model and its optimizer (local)."""
        return KerasLoop(self.recipe, course, data)
