"""Loading a recipe: the function of a built-in one, or one in a file of the user's."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.advice import did_you_mean
from hvdtrain.errors import HvdtrainError, RecipeError, UsageError
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipes.arguments import recipe_arguments
from hvdtrain.train.recipes.recipe import Recipe


def load_recipe(options: TrainOptions) -> Callable[[], Recipe]:
    """Return a function that makes the recipe with its arguments.

    The user's file runs now, and its function whenever the result is called. Both raise
    RecipeError, from the original error, if the user's own code fails.
    """
    location = options.recipe_location
    if location.path is None:
        title = f"recipe {options.recipe}"
        name = options.recipe if options.framework == "torch" else f"{options.recipe}_keras"
        function = import_module(f"hvdtrain.train.recipes.builtin.{name}").recipe
    else:
        title = f"{location.path}:{location.function}"
        function = _function(_load(location.path), location.function, str(location.path))
    arguments = recipe_arguments(function, title, options.set, options.data_dir)
    return lambda: _make(function, arguments, title, location.path)


def _load(path: Path) -> ModuleType:
    """Run a file as a module with a unique name.

    The module is in sys.modules, so that what it defines can be pickled and its annotations read.
    """
    file = path.absolute()
    digest = hashlib.blake2b(str(file).encode("utf-8", "surrogateescape"), digest_size=4)
    module = ModuleType(f"_hvdtrain_recipe_{path.stem}_{digest.hexdigest()}")
    module.__file__ = str(file)
    try:
        code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"recipe {path} cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        raise _syntax_error(error, path) from error
    except ValueError as error:  # null bytes, in Python 3.11.3 and before
        raise UsageError(f"recipe {path} is no Python: {error}") from error
    sys.modules[module.__name__] = module
    with _importing_beside(path):
        try:
            exec(code, module.__dict__)
        except HvdtrainError:
            raise
        except SyntaxError as error:  # in a module that it imports
            raise _syntax_error(error, path) from error
        except Exception as error:
            raise _failed(f"{path} cannot be loaded", error) from error
    return module


def _function(module: ModuleType, name: str, title: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        function: Callable[..., Any] = found
        return function
    if found is not None:
        raise UsageError(
            f"{name} in {title} is a {type(found).__name__}: write a function that returns a Recipe"
        )
    own = [
        other
        for other, one in vars(module).items()
        if inspect.isfunction(one) and one.__module__ == module.__name__
    ]
    has = f"it has {', '.join(own)}" if own else "it has none"
    raise UsageError(f"{title} has no function {name}{did_you_mean(name, own) or ':'} {has}")


def _make(
    function: Callable[..., Any], arguments: dict[str, Any], title: str, path: Path | None
) -> Recipe:
    if path is None:
        made = function(**arguments)
    else:
        with _importing_beside(path):
            try:
                made = function(**arguments)
            except HvdtrainError:
                raise
            except Exception as error:
                raise _failed(f"{title} failed", error) from error
    if not isinstance(made, Recipe):
        raise UsageError(f"{title} returned {_describe(made)}, expected a hvdtrain.train.Recipe")
    return made


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """Allow imports of modules beside a file, as in a script; installed packages come first."""
    folder = str(path.absolute().parent)
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


def _failed(what: str, error: Exception) -> RecipeError:
    """Return the error for an exception in the user's code, with a traceback that starts there."""
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next
    return RecipeError(what)


def _syntax_error(error: SyntaxError, path: Path) -> UsageError:
    line = f":{error.lineno}" if error.lineno else ""
    return UsageError(f"{error.filename or path}{line}: {error.msg}")
