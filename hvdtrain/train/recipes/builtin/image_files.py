"""The parts shared by recipes whose images are files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvdtrain.data.augment import crop_and_flip
from hvdtrain.data.images import ImageFiles, read_image, require_pillow
from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipes.builtin.losses import cross_entropy
from hvdtrain.train.recipes.builtin.resnet import resnet
from hvdtrain.train.recipes.recipe import Recipe


def check_pixels(size: int, crop: int) -> None:
    """Check sizes in pixels, and that images can be read."""
    require_pillow()
    if not 1 <= crop <= size:
        raise UsageError(f"crop must be from 1 to size, got crop {crop} and size {size}")


def photograph_recipe(
    train: ImageFiles, test: ImageFiles, label_smoothing: float, width: int, blocks: int
) -> Recipe:
    """Return a residual network for photographs, which are cropped and flipped in training."""
    crop = test.crop or test.size
    return Recipe(
        model=resnet(len(train.classes), width, stages=4, blocks=blocks, large=True),
        train=train,
        test=test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": Accuracy()},
        augment=partial(crop_and_flip, size=crop),
        read=partial(read_batch_of_one, size=test.size, crop=crop),
        classes=train.classes,
    )


def read_batch_of_one(path: Path, size: int, crop: int | None = None) -> npt.NDArray[np.float32]:
    """Return read_image() as a batch, float32 [1, 3, pixels, pixels]."""
    return read_image(path, size, crop)[None]
