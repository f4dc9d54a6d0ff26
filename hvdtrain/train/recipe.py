"""Recipes of users' files import `Recipe` from here; `hvdtrain.train.Recipe` is the same class."""

from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["Recipe"]
