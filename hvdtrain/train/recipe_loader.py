"""Loading a recipe: a built-in function or one in a user's file, and its arguments."""

from __future__ import annotations

import collections.abc
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hvdtrain.core.exits import own_frame
from hvdtrain.errors import HvdtrainError, RecipeError, UsageError, did_you_mean
from hvdtrain.train.config_file import shorten
from hvdtrain.train.option import KINDS
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import MODULES, Recipe

_NULLS = ("none", "null")
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)


def convert(value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    if hint in (*KINDS, NoneType):
        return _simple(value, hint)
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return _first_of(value, get_args(hint))
    if origin is Literal:
        for choice in get_args(hint):
            if (type(value) is type(choice) and value == choice) or value == _written(choice):
                return choice
        raise ValueError(value)
    if origin in _SEQUENCES:
        return _sequence(value, origin, get_args(hint))
    raise TypeError(hint)


def describe_hint(hint: Any) -> str:
    if hint in KINDS:
        return KINDS[hint].words
    if hint is NoneType:
        return "none"
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(describe_hint, parts))
    if origin is Literal:
        return f"one of {', '.join(map(_written, parts))}"
    if origin is tuple and parts and parts[-1] is not Ellipsis:
        return f"{len(parts)} values with commas between ({', '.join(map(describe_hint, parts))})"
    if origin in _SEQUENCES:
        return f"values with commas between, each {describe_hint(parts[0] if parts else str)}"
    return str(getattr(hint, "__name__", hint))


def hint_of_default(default: Any) -> Any:
    """Return the annotation that a default implies: its type, or Any for None and no default."""
    if isinstance(default, list | tuple):
        kind = type(default[0]) if default else str
        return list[kind] if isinstance(default, list) else tuple[kind, ...]  # type: ignore[valid-type]
    return type(default) if type(default) in KINDS else Any


def _simple(value: Any, kind: Any) -> Any:
    if kind is NoneType:
        if value is None or (isinstance(value, str) and value.lower() in _NULLS):
            return None
    elif isinstance(value, str):
        return KINDS[kind].read(value)
    # In Python True is an int.
    elif isinstance(value, bool) or kind is bool:
        if type(value) is kind:
            return value
    elif isinstance(value, kind) or (kind is float and isinstance(value, int)):
        return kind(value)
    raise ValueError(value)


def _first_of(value: Any, hints: tuple[Any, ...]) -> Any:
    """Convert to the first type that accepts the value; str accepts any text and comes last."""
    for hint in sorted(hints, key=lambda hint: (hint is str, hint is Path)):
        if hint is NoneType and str in hints and isinstance(value, str):
            continue
        try:
            return convert(value, hint)
        except ValueError:
            continue
    raise ValueError(value)


def _written(choice: Any) -> str:
    return str(choice).lower() if choice is None or isinstance(choice, bool) else str(choice)


def _sequence(value: Any, origin: Any, hints: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        parts: list[Any] = [part.strip() for part in value.split(",")] if value.strip() else []
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        raise ValueError(value)
    if origin is tuple and hints and hints[-1] is not Ellipsis:
        if len(parts) != len(hints):
            raise ValueError(value)
        return tuple(convert(part, hint) for part, hint in zip(parts, hints, strict=True))
    kind = hints[0] if hints else str
    made = [convert(part, kind) for part in parts]
    return made if origin is list else tuple(made)


_DATA_DIR = "data_dir"
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def recipe_arguments(
    function: Callable[..., Any], title: str, values: Mapping[str, Any], data_dir: Path | None
) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    known = {name: one for name, one in parameters.items() if one.kind in _BY_NAME}
    hints = _hints(function, known)
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name == _DATA_DIR:
            raise UsageError(f"--set {_DATA_DIR}: say --data-dir instead")
        if name in known:
            arguments[name] = _value(f"--set {name}", value, hints[name])
        elif takes_any:
            arguments[name] = value
        else:
            others = [one for one in known if one != _DATA_DIR]
            takes = f"it takes {', '.join(others)}" if others else "it takes none"
            near = did_you_mean(name, others)
            raise UsageError(f"--set {name}: {title} has no such argument{near or ':'} {takes}")
    if data_dir is not None:
        if _DATA_DIR not in known:
            raise UsageError(f"--data-dir {data_dir}: {title} takes no data_dir: leave it out")
        arguments[_DATA_DIR] = _value("--data-dir", str(data_dir), hints[_DATA_DIR])
    missing = [
        "--data-dir DIR" if name == _DATA_DIR else f"--set {name}=VALUE"
        for name, one in known.items()
        if one.default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        raise UsageError(f"{title} needs {' and '.join(missing)}")
    return arguments


def _hints(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Return the annotation of each parameter, or the one that its default implies."""
    try:
        annotations = get_type_hints(function)
    except Exception:  # an annotation may use names that only type checkers see
        annotations = {}
    return {
        name: annotations[name] if name in annotations else hint_of_default(one.default)
        for name, one in parameters.items()
    }


def _value(label: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except ValueError:
        raise UsageError(f"{label} must be {describe_hint(hint)}, got {shorten(value)}") from None
    except TypeError:
        raise UsageError(
            f"{label}: a value of type {describe_hint(hint)} cannot be given as text: annotate it "
            "with int, float, bool, str, Path, Literal, or a list or tuple of one of these"
        ) from None


def load_recipe(options: TrainOptions) -> Callable[[], Recipe]:
    """Return a function that makes the recipe with its arguments.

    The user's file runs now, and its function whenever the result is called. Both raise
    RecipeError, from the original error, if the user's own code fails.
    """
    location = options.recipe_location
    if location.path is None:
        title = f"recipe {options.recipe}"
        module = import_module(f"hvdtrain.train.recipes.{options.framework}_recipes")
        function = getattr(module, options.recipe)
    else:
        title = f"{location.path}:{location.function}"
        function = _function(
            _load(location.path, options.verbose), location.function, str(location.path)
        )
    arguments = recipe_arguments(function, title, options.set, options.data_dir)
    path, verbose = location.path, options.verbose

    def make() -> Recipe:
        with _code_of_user(path, f"{title} failed", verbose) if path else nullcontext():
            made = function(**arguments)
        if not isinstance(made, Recipe):
            what = "None" if made is None else f"a {type(made).__name__}"
            raise UsageError(f"{title} returned {what}, expected a hvdtrain.train.Recipe")
        return made

    return make


class _RecipeModule(ModuleType):
    """A user's file as a module; a process that unpickles it runs the file."""

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str | None]]:
        return _load_in_worker, (self.__file__,)


def _load_in_worker(file: str) -> ModuleType:
    sys.path.append(str(Path(file).parent))  # for what was imported later than the file was run
    return _load(Path(file), verbose=False)


def _load(path: Path, verbose: bool) -> ModuleType:
    """Run a file as a module with a unique name.

    The module is in sys.modules, so that what it defines can be pickled and its annotations read.
    """
    file = path.absolute()
    digest = hashlib.blake2b(str(file).encode("utf-8", "surrogateescape"), digest_size=4)
    module = _RecipeModule(f"{MODULES}{path.stem}_{digest.hexdigest()}")
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
    with _code_of_user(path, f"{path} cannot be loaded", verbose):
        try:
            exec(code, module.__dict__)
        except SyntaxError as error:  # in a module that it imports
            raise _syntax_error(error, path) from error
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


@contextmanager
def _code_of_user(path: Path, failed: str, verbose: bool) -> Iterator[None]:
    """Run code of a user's file: what it raises is a RecipeError, and it imports as a script does.

    Modules are found beside the file, too; installed packages come first.
    """
    folder = str(path.absolute().parent)
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:
        raise RecipeError(f"{failed}: {own_frame(error, verbose)}") from error
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


def _syntax_error(error: SyntaxError, path: Path) -> UsageError:
    line = f":{error.lineno}" if error.lineno else ""
    return UsageError(f"{error.filename or path}{line}: {error.msg}")
