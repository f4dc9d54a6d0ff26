"""The main job with Keras, on its backends tensorflow, torch and jax."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal, Protocol

import keras

from hvdtrain.devices import Device
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.keras.building import build_recipe
from hvdtrain.train.keras.loop import KerasLoop
from hvdtrain.train.loop.course import Course
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["KerasFramework"]

# Where a rank computes, by the backend of Keras.
_PLACES = {
    "jax": "hvdtrain.train.keras.jax_place",
    "tensorflow": "hvdtrain.train.keras.tensorflow_place",
    "torch": "hvdtrain.train.torch.place",
}


class _Place(Protocol):
    """Where a rank computes, on one of Keras's backends; a module."""

    def prepare(self, topology: Topology, options: TrainOptions) -> Device:
        """Pin a device or take a share of the cores; tell which device (local)."""


class KerasFramework:
    """Trains with `compile` and `fit`.

    Args:
        options: of the run.

    Raises:
        UsageError: Keras runs on another backend already.
    """

    tensors: Literal["np"] = "np"

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._backend = keras.backend.backend()
        if options.backend not in (None, self._backend):
            raise UsageError(
                f"--backend {options.backend}: Keras was imported before, and runs on "
                f"{self._backend}: set KERAS_BACKEND={options.backend} before that"
            )
        self._device = Device("")
        self.title = f"keras on {self._backend}"

    def prepare(self, topology: Topology) -> None:
        """Pin one GPU per local rank or take a share of the cores (local).

        Raises:
            UsageError: there is no such device.
        """
        module: Any = importlib.import_module(_PLACES[self._backend])
        place: _Place = module
        self._device = place.prepare(topology, self._options)

    def build(self, make: Callable[[], Recipe], topology: Topology) -> Recipe:
        """Call a recipe with this rank's random generators seeded, and check it (local).

        Raises:
            UsageError: its model or its loss is none of Keras.
        """
        return build_recipe(make, self._options, topology)

    def device(self) -> Device:
        """Tell what this rank computes on (local)."""
        return self._device

    def threads(self) -> int | None:
        """Return None: the backend decides (local)."""
        return None

    def use_threads(self, threads: int) -> None:
        """Do nothing: the backend has decided (local)."""

    def make_loop(self, recipe: Recipe, course: Course) -> KerasLoop:
        """Prepare the optimizer (local)."""
        return KerasLoop(recipe, course)
