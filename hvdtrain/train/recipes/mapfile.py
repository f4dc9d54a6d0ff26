"""A small residual network on images listed with their labels in map files."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.data.map_file import load_map_files
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.parts import check_pixels, photograph_recipe


def recipe(
    data_dir: Path | None = None,
    label_smoothing: float = 0.0,
    width: int = 32,
    blocks: int = 2,
    size: int = 144,
    crop: int = 128,
) -> Recipe:
    """Return a network for color images [n, 3, crop, crop]."""
    check_pixels(size, crop)
    train, test = load_map_files(data_dir, size, crop)
    return photograph_recipe(train, test, label_smoothing, width, blocks)
