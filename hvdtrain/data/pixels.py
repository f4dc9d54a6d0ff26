"""Pixels standardized for networks, to mean 0 and standard deviation 1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
