"""Image files with labels, read one by one when they are needed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.augment import center_crop
from hvdtrain.errors import UsageError

__all__ = ["ENDINGS", "ImageFiles", "read_image", "require_pillow"]

# Per color, of ImageNet's training images between 0 and 1: most networks are trained with these.
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def standardized(pixels: Pixels, mean: float | Floats, deviation: float | Floats) -> Floats:
    """Return (pixels / 255 - mean) / deviation, float32, in C order."""
    scaled = pixels.astype(np.float32, order="C")
    scaled /= 255
    scaled -= mean
    scaled /= deviation
    return scaled


def standardized_colors(pixels: Pixels) -> Floats:
    """Return RGB pixels, [..., 3, height, width], standardized with ImageNet's statistics."""
    return standardized(pixels, _MEAN, _DEVIATION)


ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class ImageFiles:
    """A map-style data set of image files: [index] returns (image, label).

    Attributes:
        paths: paths of the files.
        labels: classes of the images, from 0.
        classes: names of the classes.
        size: pixels of the shorter side after resizing; a square is cropped around the center.
        crop: pixels of the square returned from the center of that; None: all of it.
    """

    paths: Sequence[Path]
    labels: Sequence[int]
    classes: Sequence[str]
    size: int
    crop: int | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32], int]:
        """Return the image, as from read_image(), and the label of a sample."""
        return read_image(self.paths[index], self.size, self.crop), self.labels[index]


def read_image(path: Path, size: int, crop: int | None = None) -> npt.NDArray[np.float32]:
    """Return an image in three colors, standardized float32 [3, pixels, pixels].

    Args:
        path: file that Pillow can read.
        size: pixels of the shorter side after resizing; a square is cropped around the center.
        crop: pixels of the square returned from the center of that; None: all of it.

    Raises:
        UsageError: it cannot be read, or Pillow is not installed.
    """
    pillow = require_pillow()
    try:
        with pillow.open(path) as image:
            pixels = np.asarray(_square(image.convert("RGB"), size, pillow.Resampling.BILINEAR))
    # Pillow's readers raise whatever the parser of a format raises.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot read the image {path}: {reason}") from None
    scaled = standardized_colors(pixels.transpose(2, 0, 1))
    return scaled if crop is None else center_crop(scaled, crop)


def require_pillow() -> ModuleType:
    """Import PIL.Image.

    Raises:
        UsageError: Pillow is not installed.
    """
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise UsageError(
            "images are read by Pillow, which is not installed: pip install pillow"
        ) from None


def _square(image: Any, size: int, filter_: Any) -> Any:
    width, height = image.size
    shorter = min(width, height)
    left, top = (width - shorter) // 2, (height - shorter) // 2
    # Resized and cropped in one step.
    kept = (left, top, left + shorter, top + shorter)
    return image.resize((size, size), filter_, box=kept)
