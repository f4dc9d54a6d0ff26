"""Nested content flattened into named tensors and a JSON skeleton, and back. Pure functions.

The skeleton is the content with `{"$tensor": NAME}` in place of each tensor. Lists, dicts with
string keys, strings, numbers, booleans and None represent themselves; `{"$tuple": [...]}`,
`{"$dict": [[key, value], ...]}` (with other keys) and `{"$float": "nan"}` (or inf, -inf) represent
what JSON lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_TENSOR, _TUPLE, _DICT, _FLOAT = "$tensor", "$tuple", "$dict", "$float"
# Reserved by the header of safetensors files.
_RESERVED = "__metadata__"


def flatten(content: Any) -> tuple[dict[str, Any], Any]:
    """Separate content into its tensors and a skeleton."""
    tensors: dict[str, Any] = {}
    return tensors, _flatten(content, (), tensors)


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Rebuild the content that flatten() has separated."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("$"):
        return {key: unflatten(value, tensors) for key, value in skeleton.items()}
    ((_, value),) = skeleton.items()
    if tag == _TENSOR:
        return tensors[value]
    if tag == _TUPLE:
        return tuple(unflatten(item, tensors) for item in value)
    if tag == _DICT:
        return {key: unflatten(item, tensors) for key, item in value}
    if tag == _FLOAT:
        return float(value)
    raise ValueError(f"unknown tag {tag!r}")


def _flatten(value: Any, path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        return _flatten_dict(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [_flatten(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        name = _unused_name(path, tensors)
        tensors[name] = value
        return {_TENSOR: name}
    raise TypeError(
        f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint does not hold: give "
        "tensors, numbers, strings, and lists and dicts of them"
    )


def _flatten_dict(value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    for key in value:
        if not isinstance(key, (str, int)):
            raise TypeError(
                f"{'/'.join(path)} has the key {key!r}: a checkpoint holds strings and integers"
            )
    items = [(key, _flatten(v, (*path, str(key)), tensors)) for key, v in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {_DICT: [[key, item] for key, item in items]}


def _unused_name(path: tuple[str, ...], tensors: Mapping[str, Any]) -> str:
    # Half of a surrogate pair, which Python's strings may hold, cannot be encoded.
    name = plain = "/".join(path).encode("utf-8", "backslashreplace").decode()
    number = 1
    while name in tensors or name == _RESERVED:
        number += 1
        name = f"{plain}#{number}"
    return name
