"""Conversion of text that a user wrote to a function's annotations. Pure functions."""

from __future__ import annotations

import collections.abc
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hvdtrain.train.config.plain_text import read_text

_SIMPLE: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "none",
}
_NULLS = ("none", "null")
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)


def convert(value: Any, hint: Any) -> Any:
    """Return a value converted to an annotation."""
    if hint is Any:
        return value
    if hint in _SIMPLE:
        return _simple(value, hint)
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        return _first_of(value, get_args(hint))
    if origin is Literal:
        return _literal(value, get_args(hint))
    if origin in _SEQUENCES:
        return _sequence(value, origin, get_args(hint))
    raise TypeError(hint)


def describe_hint(hint: Any) -> str:
    """Describe the values that an annotation accepts."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
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
    """Return the annotation that a default implies: its type, or Any for None."""
    if isinstance(default, list | tuple):
        kind = type(default[0]) if default else str
        return list[kind] if isinstance(default, list) else tuple[kind, ...]  # type: ignore[valid-type]
    return type(default) if type(default) in _SIMPLE and default is not None else Any


def _simple(value: Any, kind: Any) -> Any:
    if kind is NoneType:
        if value is None or (isinstance(value, str) and value.lower() in _NULLS):
            return None
    elif isinstance(value, str):
        return read_text(kind, value)
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


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if (type(value) is type(choice) and value == choice) or value == _written(choice):
            return choice
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
