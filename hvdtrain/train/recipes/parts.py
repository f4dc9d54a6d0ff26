"""The parts that recipes with torch share: losses, residual networks, image files.

The networks normalize groups of channels within each sample (Wu and He, arXiv:1803.08494): the
gradient of a batch is the mean over its samples, however the batch is split between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.data.augment import crop_and_flip
from hvdtrain.data.images import ImageFiles, read_image, require_pillow
from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe


def cross_entropy(label_smoothing: float) -> Callable[..., torch.Tensor]:
    """Return the mean cross entropy of scores [n, classes, ...] and labels [n, ...]."""
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    return partial(torch.nn.functional.cross_entropy, label_smoothing=label_smoothing)


_GROUPS = 8


def resnet(
    classes: int, width: int, stages: int, blocks: int, channels: int = 3, large: bool = False
) -> nn.Module:
    """Return a network that maps images [n, channels, height, width] to scores [n, classes]."""
    if large:
        stem = [_convolution(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    else:
        stem = [_convolution(channels, width, 3, 1), nn.ReLU()]
    body: list[nn.Module] = []
    inputs = width
    for stage in range(stages):
        outputs = width << stage
        for number in range(blocks):
            body.append(_Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*stem, *body, *head)


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.GroupNorm(math.gcd(_GROUPS, outputs), outputs),
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))


def photograph_recipe(
    load: Callable[[Path | None, int, int], tuple[ImageFiles, ImageFiles]],
) -> Callable[..., Recipe]:
    """Return a recipe for photographs, which are cropped and flipped in training."""

    def recipe(
        data_dir: Path | None = None,
        label_smoothing: float = 0.0,
        width: int = 32,
        blocks: int = 2,
        size: int = 144,
        crop: int = 128,
    ) -> Recipe:
        """Return a residual network for color images [n, 3, crop, crop]."""
        require_pillow()
        if not 1 <= crop <= size:
            raise UsageError(f"crop must be from 1 to size, got crop {crop} and size {size}")
        train, test = load(data_dir, size, crop)
        return Recipe(
            model=resnet(len(train.classes), width, stages=4, blocks=blocks, large=True),
            train=train,
            test=test,
            loss=cross_entropy(label_smoothing),
            metrics={"accuracy": Accuracy()},
            augment=partial(crop_and_flip, size=crop),
            read=partial(read_batch_of_one, size=size, crop=crop),
            classes=train.classes,
        )

    return recipe


def read_batch_of_one(path: Path, size: int, crop: int | None = None) -> npt.NDArray[np.float32]:
    """Return read_image() as a batch, float32 [1, 3, pixels, pixels]."""
    return read_image(path, size, crop)[None]
