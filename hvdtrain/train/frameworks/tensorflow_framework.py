"""The main job with TensorFlow."""

from __future__ import annotations

from hvdtrain.data.dataset import Dataset
from hvdtrain.devices import Device
from hvdtrain.topology import Topology
from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.tensorflow_loop import TensorFlowLoop
from hvdtrain.train.frameworks.tensorflow_place import prepare
from hvdtrain.train.keras_recipe import KerasRecipe, load_recipe
from hvdtrain.train.options import TrainOptions

__all__ = ["TensorFlowFramework"]


class TensorFlowFramework:
    """Trains a model of tf.keras in a loop of its own, with a tape.

    Args:
        options: of the run.
    """

    title = "tensorflow"

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self.recipe: KerasRecipe = load_recipe(options.recipe)

    def prepare(self, topology: Topology) -> Device:
        """Pin one GPU per local rank or take a share of the cores; tell which device (local).

        Raises:
            UsageError: there is no such device.
        """
        return prepare(topology, self._options, self.recipe.most_threads)

    def make_loop(self, course: Course, data: Dataset) -> TensorFlowLoop:
        """Build the model and its optimizer (local)."""
        return TensorFlowLoop(self.recipe, course, data)
