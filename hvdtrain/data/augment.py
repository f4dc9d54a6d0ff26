"""Changes of images that are drawn anew in each epoch, by a generator that the caller gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["center_crop", "crop_and_flip", "random_crop", "random_flip"]

Image = npt.NDArray[Any]


def random_crop(image: Image, size: int, generator: np.random.Generator, padding: int = 0) -> Image:
    """Return a square of `size` pixels from anywhere in an image, [..., height, width].

    Args:
        image: at least as large as the square, with its padding.
        size: of the square.
        generator: draws its place.
        padding: zeros to add on each side before.
    """
    if padding:
        sides = [(0, 0)] * (image.ndim - 2) + [(padding, padding)] * 2
        image = np.pad(image, sides)
    height, width = image.shape[-2:]
    top = int(generator.integers(height - size + 1))
    left = int(generator.integers(width - size + 1))
    return image[..., top : top + size, left : left + size]


def random_flip(image: Image, generator: np.random.Generator) -> Image:
    """Return an image, [..., height, width], or in half of all cases its mirror image."""
    if generator.integers(2):
        # A view that runs backwards is none to torch.
        return np.ascontiguousarray(image[..., ::-1])
    return image


def center_crop(image: Image, size: int) -> Image:
    """Return the square of `size` pixels in the middle of an image, [..., height, width]."""
    height, width = image.shape[-2:]
    top, left = (height - size) // 2, (width - size) // 2
    return image[..., top : top + size, left : left + size]


def crop_and_flip(
    image: Image, generator: np.random.Generator, size: int, padding: int = 0
) -> Image:
    """Return random_flip() of random_crop(): what most recipes for photographs do."""
    return random_flip(random_crop(image, size, generator, padding), generator)
