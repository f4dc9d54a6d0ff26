"""A small residual network on images in one folder per class."""

from __future__ import annotations

from hvdtrain.data.image_folder import load_image_folders
from hvdtrain.train.recipes.parts import photograph_recipe

recipe = photograph_recipe(load_image_folders)
