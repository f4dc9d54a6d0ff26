"""Random changes of images, drawn from a generator that the caller passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["center_crop", "crop_and_flip", "random_crop", "random_flip"]

Image = npt.NDArray[Any]


def random_crop(image: Image, size: int, generator: np.random.Generator, padding: int = 0) -> Image:
    """Return a square cropped at a random position from an image.

    Args:
        image: image, [..., height, width], at least as large as the square with its padding.
        size: height and width of the square.
        generator: generator of the position.
        padding: zeros to add on each side before cropping.
    """
    if padding:
        sides = [(0, 0)] * (image.ndim - 2) + [(padding, padding)] * 2
        image = np.pad(image, sides)
    height, width = image.shape[-2:]
    top = int(generator.integers(height - size + 1))
    left = int(generator.integers(width - size + 1))
    return image[..., top : top + size, left : left + size]


def random_flip(image: Image, generator: np.random.Generator) -> Image:
    """Return an image, mirrored left to right in half of all cases.

    Args:
        image: image, [..., height, width].
        generator: generator of the decision.
    """
    if generator.integers(2):
        # torch does not accept views with negative strides.
        return np.ascontiguousarray(image[..., ::-1])
    return image


def center_crop(image: Image, size: int) -> Image:
    """Return the square of `size` pixels at the center of an image.

    Args:
        image: image, [..., height, width], at least as large as the square.
        size: height and width of the square.
    """
    height, width = image.shape[-2:]
    top, left = (height - size) // 2, (width - size) // 2
    return image[..., top : top + size, left : left + size]


def crop_and_flip(
    image: Image, generator: np.random.Generator, size: int, padding: int = 0
) -> Image:
    """Return random_flip() of random_crop(), as most recipes for photographs do."""
    return random_flip(random_crop(image, size, generator, padding), generator)
