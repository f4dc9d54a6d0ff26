"""A small residual network on images listed with their labels in map files."""

from __future__ import annotations

from hvdtrain.data.map_file import load_map_files
from hvdtrain.train.recipes.parts import photograph_recipe

recipe = photograph_recipe(load_map_files)
