"""What is trained with Keras or TensorFlow: a model, its data, its loss and its optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.data.dataset import Dataset

__all__ = ["KerasRecipe", "load_recipe"]


@dataclass(frozen=True)
class KerasRecipe:
    """A classification task for Keras, on any backend.

    Layers have names of their own, by which checkpoints know their weights.

    Attributes:
        name: what it is called on the command line and in checkpoints.
        load_data: returns the training and the test samples.
        build_model: returns a new model with random weights of Keras's floatx; it maps inputs
            [n, ...] to one score per class, [n, classes].
        build_loss: returns the loss, a keras.losses.Loss that sums over samples, each times its
            sample_weight.
        build_optimizer: makes an optimizer from its name ("sgd" or "adam") and its learning rate,
            a number or a schedule of Keras.
        most_threads: compute threads per rank from which on more of them slow it down.
    """

    name: str
    load_data: Callable[[], Dataset]
    build_model: Callable[[], Any]
    build_loss: Callable[[], Any]
    build_optimizer: Callable[[str, Any], Any]
    most_threads: int


def load_recipe(name: str) -> KerasRecipe:
    """Return the built-in recipe of this name (one of options.RECIPES)."""
    module = importlib.import_module(f"hvdtrain.train.recipes.{name}_keras")
    recipe: KerasRecipe = module.recipe
    return recipe
