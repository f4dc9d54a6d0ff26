"""What is trained: a model, its data, its loss and its optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hvdtrain.data.dataset import Dataset

__all__ = ["TorchRecipe", "load_recipe"]


@dataclass(frozen=True)
class TorchRecipe:
    """A classification task for torch.

    Attributes:
        name: what it is called on the command line and in checkpoints.
        load_data: returns the training and the test samples.
        build_model: returns a new model with random weights; it maps inputs [n, ...] to one
            score per class, [n, classes].
        loss: mean loss of scores [n, classes] and labels [n], a scalar.
        optimizer: makes an optimizer from its name ("sgd" or "adam"), the parameters and the
            first learning rate.
        most_threads: compute threads per rank from which on more of them slow it down.
    """

    name: str
    load_data: Callable[[], Dataset]
    build_model: Callable[[], torch.nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: Callable[[str, Iterable[torch.nn.Parameter], float], torch.optim.Optimizer]
    most_threads: int


def load_recipe(name: str) -> TorchRecipe:
    """Return the built-in recipe of this name (one of options.RECIPES)."""
    module = importlib.import_module(f"hvdtrain.train.recipes.{name}")
    recipe: TorchRecipe = module.recipe
    return recipe
