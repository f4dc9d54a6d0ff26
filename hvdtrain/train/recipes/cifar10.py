"""A small residual network on CIFAR-10."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hvdtrain.data.augment import crop_and_flip
from hvdtrain.data.cifar10 import CLASSES, load_cifar10
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.parts import cross_entropy, read_batch_of_one, resnet

_PIXELS = 32
_PADDING = 4


def recipe(
    data_dir: Path | None = None, label_smoothing: float = 0.0, width: int = 16, blocks: int = 3
) -> Recipe:
    """Return a network for images [n, 3, 32, 32], which are shifted and flipped in training."""
    data = load_cifar10(data_dir)
    return Recipe(
        model=resnet(len(CLASSES), width, stages=3, blocks=blocks),
        train=data.train,
        test=data.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": Accuracy()},
        augment=partial(crop_and_flip, size=_PIXELS, padding=_PADDING),
        read=partial(read_batch_of_one, size=_PIXELS),
        classes=CLASSES,
    )
