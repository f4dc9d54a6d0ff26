"""The main job with TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hvdtrain.devices import Device
from hvdtrain.topology import Topology
from hvdtrain.train.keras.building import build_recipe
from hvdtrain.train.keras.tensorflow_loop import TensorFlowLoop
from hvdtrain.train.keras.tensorflow_place import prepare
from hvdtrain.train.loop.course import Course
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["TensorFlowFramework"]


class TensorFlowFramework:
    """Trains a model of tf.keras in a loop of its own, with a tape.

    Args:
        options: of the run.
    """

    title = "tensorflow"
    tensors: Literal["np"] = "np"

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._device = Device("")

    def prepare(self, topology: Topology) -> None:
        """Pin one GPU per local rank or take a share of the cores (local).

        Raises:
            UsageError: there is no such device.
        """
        self._device = prepare(topology, self._options)

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

    def make_loop(self, recipe: Recipe, course: Course) -> TensorFlowLoop:
        """Prepare the optimizer (local)."""
        return TensorFlowLoop(recipe, course)
