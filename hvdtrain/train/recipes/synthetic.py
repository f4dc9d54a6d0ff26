"""Synthetic data of any shape: a residual network for images, dense layers for vectors."""

from __future__ import annotations

from torch import nn

from hvdtrain.data.dataset import make_synthetic
from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.parts import cross_entropy, resnet


def recipe(
    shape: str = "3x32x32",
    classes: int = 10,
    samples: int = 4096,
    data_seed: int = 0,
    width: int = 16,
    label_smoothing: float = 0.0,
) -> Recipe:
    """Return a network for inputs [n, *shape], and synthetic data."""
    numbers = _parsed(shape)
    data = make_synthetic(samples, numbers, classes, data_seed)
    if len(numbers) == 1:
        model = _dense(numbers[0], classes, 16 * width)
    else:
        model = resnet(classes, width, stages=3, blocks=1, channels=numbers[0])
    return Recipe(
        model=model,
        train=data.train,
        test=data.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": Accuracy()},
    )


def _parsed(shape: str) -> list[int]:
    parts = shape.split("x")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"shape must be like 3x32x32 or 100, got {shape!r}")
    return [int(part) for part in parts]


def _dense(inputs: int, classes: int, width: int) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))
