"""The arguments of a recipe's function, from --set and --data-dir."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from hvdtrain.advice import did_you_mean
from hvdtrain.errors import UsageError
from hvdtrain.train.config.plain_text import shorten
from hvdtrain.train.recipes.annotations import convert, describe_hint, hint_of_default

_DATA_DIR = "data_dir"
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def recipe_arguments(
    function: Callable[..., Any], title: str, values: Mapping[str, Any], data_dir: Path | None
) -> dict[str, Any]:
    """Return the arguments to call a recipe's function with."""
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
            raise _unknown(name, title, [one for one in known if one != _DATA_DIR])
    if data_dir is not None:
        if _DATA_DIR not in known:
            raise UsageError(f"--data-dir {data_dir}: {title} takes no data_dir: leave it out")
        arguments[_DATA_DIR] = _value("--data-dir", str(data_dir), hints[_DATA_DIR])
    _require_all(known, arguments, title)
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
        name: annotations[name] if name in annotations else hint_of_default(_default(one))
        for name, one in parameters.items()
    }


def _default(parameter: inspect.Parameter) -> Any:
    return None if parameter.default is inspect.Parameter.empty else parameter.default


def _value(label: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except ValueError:
        raise UsageError(f"{label} must be {describe_hint(hint)}, got {shorten(value)}") from None
    except TypeError:
        raise UsageError(
            f"{label}: what it wants, {describe_hint(hint)}, cannot be said here: annotate it with "
            "int, float, bool, str, Path, Literal, or a list or tuple of one of these"
        ) from None


def _unknown(name: str, title: str, known: list[str]) -> UsageError:
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    near = did_you_mean(name, known)
    return UsageError(f"--set {name}: {title} has no such argument{near or ':'} {takes}")


def _require_all(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], title: str
) -> None:
    missing = [
        "--data-dir DIR" if name == _DATA_DIR else f"--set {name}=VALUE"
        for name, one in parameters.items()
        if one.default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        raise UsageError(f"{title} needs {' and '.join(missing)}")
