"""Options for the recipe and the framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.options.checks import one_of
from hvdtrain.train.options.declare import OptionGroup, option

FRAMEWORKS = ("torch", "keras")
BACKENDS = ("tensorflow", "torch", "jax")

RECIPES = ("digits", "mnist", "cifar10", "imagefolder", "mapfile", "text", "synthetic")
_WITH_KERAS = ("digits", "mnist")
_FILE = re.compile(r"(?P<path>.+\.py)(:(?P<function>[^:/]*))?", re.DOTALL)
_DEFAULT_FUNCTION = "recipe"


def _check_framework(label: str, value: str) -> None:
    if value == "tensorflow":
        raise UsageError(
            f"{label} tensorflow was removed: it trained the same Keras models; use --framework "
            "keras --backend tensorflow (in a file: framework: keras, backend: tensorflow)"
        )
    one_of(FRAMEWORKS)(label, value)


@dataclass(frozen=True)
class RecipeLocation:
    """Where the function of a recipe is."""

    path: Path | None
    function: str = _DEFAULT_FUNCTION


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """Options for the recipe and the framework."""

    title = "What is trained"

    recipe: str = option(
        "digits",
        f"Model and data to train: {', '.join(RECIPES)}, or a function in your own file.",
        metavar="NAME|FILE.py[:FUNCTION]",
    )
    set: Mapping[str, Any] = option(
        {},
        "Argument of the recipe's function; may be given several times.",
        metavar="NAME=VALUE",
    )
    data_dir: Path | None = option(None, "Directory of the recipe's data.", metavar="DIR")
    framework: str = option(
        "torch", "Framework that trains the model.", choices=FRAMEWORKS, check=_check_framework
    )
    backend: str | None = option(
        None,
        "Backend of Keras.",
        choices=BACKENDS,
        unset="$KERAS_BACKEND, or tensorflow",
    )

    def check(self) -> None:
        """Check that the options of this group go together."""
        if self.backend is not None and self.framework != "keras":
            raise UsageError(f"--backend {self.backend} goes with --framework keras only")
        location = self.recipe_location
        if location.path is None:
            _require_built_in(self.recipe, self.framework)
        elif not location.function.isidentifier():
            raise UsageError(
                f"recipe {self.recipe!r}: {location.function!r} is no name of a function, as in "
                f"{location.path}:{_DEFAULT_FUNCTION}"
            )

    @property
    def recipe_location(self) -> RecipeLocation:
        """Where the function of the recipe is."""
        found = _FILE.fullmatch(self.recipe)
        if found is None:
            return RecipeLocation(None)
        named = found["function"]
        return RecipeLocation(Path(found["path"]), _DEFAULT_FUNCTION if named is None else named)

    @property
    def recipe_title(self) -> str:
        """The name of the recipe for people and for files: no path, no suffix."""
        path = self.recipe_location.path
        return self.recipe if path is None else path.stem


def _require_built_in(name: str, framework: str) -> None:
    if name not in RECIPES:
        raise UsageError(
            f"unknown recipe {name!r}: choose from {', '.join(RECIPES)}, or name a file, as "
            "my_recipe.py"
        )
    if framework != "torch" and name not in _WITH_KERAS:
        raise UsageError(
            f"recipe {name} goes with --framework torch only: with {framework} choose from "
            f"{', '.join(_WITH_KERAS)}, or name a file"
        )
