"""A small convolutional network on scikit-learn's digits.

It has neither dropout nor batch normalisation: its gradient is a plain mean over samples, so
that any number of ranks gets the weights that one rank gets.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hvdtrain.data.digits import load_digits
from hvdtrain.train.options import SGD_MOMENTUM
from hvdtrain.train.recipe import TorchRecipe

__all__ = ["recipe"]


def _build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _optimizer(name: str, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=SGD_MOMENTUM)


recipe = TorchRecipe(
    name="digits",
    load_data=load_digits,
    build_model=_build_model,
    loss=nn.functional.cross_entropy,
    optimizer=_optimizer,
    most_threads=1,
)
