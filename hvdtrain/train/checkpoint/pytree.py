"""A nested content, taken apart into tensors by name and what JSON can hold of the rest. Pure.

The skeleton is the content with `{"$tensor": NAME}` where a tensor was. Lists, dicts with strings
for keys, strings, numbers, booleans and None stand as themselves; `{"$tuple": [...]}`,
`{"$dict": [[key, value], ...]}` (with other keys) and `{"$float": "nan"}` (or inf, -inf) for what
JSON does not know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["flatten", "unflatten"]

_TENSOR, _TUPLE, _DICT, _FLOAT = "$tensor", "$tuple", "$dict", "$float"
# What the header of a safetensors file keeps for itself.
_TAKEN = "__metadata__"


def flatten(content: Any) -> tuple[dict[str, Any], Any]:
    """Take a content apart.

    Args:
        content: dicts with strings or integers for keys, lists, tuples, numbers, strings, None,
            and tensors of torch or numpy. Scalars of numpy become Python's.

    Returns:
        The tensors, by names made of the keys that lead to them ("model/0.weight"), and the
        skeleton.

    Raises:
        TypeError: there is something else in it; the message says where.
    """
    tensors: dict[str, Any] = {}
    return tensors, _taken_apart(content, (), tensors)


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Put together again what split() took apart.

    Raises:
        ValueError, KeyError, TypeError: these do not belong together.
    """
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
    raise ValueError(f"nobody knows {tag!r}")


def _taken_apart(value: Any, path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        return _dict_taken_apart(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [_taken_apart(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        name = _unused_name(path, tensors)
        tensors[name] = value
        return {_TENSOR: name}
    raise TypeError(
        f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint does not hold: give "
        "tensors, numbers, strings, and lists and dicts of them"
    )


def _dict_taken_apart(
    value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[str, Any]
) -> Any:
    for key in value:
        if not isinstance(key, (str, int)):
            raise TypeError(
                f"{'/'.join(path)} has the key {key!r}: a checkpoint holds strings and integers"
            )
    items = [(key, _taken_apart(v, (*path, str(key)), tensors)) for key, v in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {_DICT: [[key, item] for key, item in items]}


def _unused_name(path: tuple[str, ...], tensors: Mapping[str, Any]) -> str:
    # Half of a surrogate pair, which Python's strings may hold, is no text to others.
    name = plain = "/".join(path).encode("utf-8", "backslashreplace").decode()
    number = 1
    while name in tensors or name == _TAKEN:
        number += 1
        name = f"{plain}#{number}"
    return name
