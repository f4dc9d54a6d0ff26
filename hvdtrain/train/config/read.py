"""Options from a YAML file, each value read as its option's type and not as YAML guesses.

`no` is a name where a name is expected, and 1e-3 a number where a number is expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.advice import did_you_mean
from hvdtrain.errors import UsageError
from hvdtrain.train.config.plain_text import read_text, shorten
from hvdtrain.train.options import OPTIONS, Option, TrainOptions

_BY_NAME = {option.name: option for option in OPTIONS}
_HINT = "(train --print-config writes all)"
_NULLS = ("", "~", "null", "Null", "NULL")
# YAML's own types; any other needs a tag, such as !!python/object.
_NAMES = ("null", "bool", "int", "float", "str", "timestamp", "seq", "map")
_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in _NAMES)


def resolve(given: Mapping[str, Any], config: Path | None) -> TrainOptions:
    """Return the options: given ones override the file, and the file overrides the defaults."""
    values = {} if config is None else read_config(config)
    arguments = {**values.get("set", {}), **given.get("set", {})}
    return TrainOptions(**{**values, **given, "set": arguments})


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a file by name."""
    values: dict[str, Any] = {}
    for name, entry in _entries(_root(path), str(path)):
        option = _BY_NAME.get(name)
        if option is None:
            keys = [one.key for one in OPTIONS]
            near = did_you_mean(name.replace("_", "-"), keys)
            raise UsageError(f"{entry.where}: no option {shorten(name)}{near} {_HINT}")
        values[name] = _value(option, entry)
    return values


@dataclass(frozen=True)
class _Entry:
    """One `key: value`."""

    where: str
    node: Any


def _root(path: Path) -> Any:
    """Return the mapping in the file as PyYAML nodes: nothing in it is constructed or run."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise UsageError("--config needs PyYAML: pip install pyyaml") from error
    try:
        text = path.read_bytes().decode("utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text: save it as that") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(
            f"{path}:{mark.line + 1}: not YAML: {error.problem or error.context}"
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: not YAML: {shorten(reason)}") from error
    if root is None:
        raise UsageError(f"{path} holds no options: write lines like 'epochs: 20' {_HINT}")
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        raise UsageError(f"{path}:{line}: expected lines like 'epochs: 20', got {_described(root)}")
    return root


def _entries(mapping: Any, path: str) -> Iterator[tuple[str, _Entry]]:
    """Yield the entries of a mapping by name, with `_` for `-`."""
    seen: dict[str, int] = {}
    for key, node in mapping.value:
        line = key.start_mark.line + 1
        where = f"{path}:{line}"
        if key.id != "scalar":
            raise UsageError(f"{where}: expected the name of an option, got {_described(key)}")
        name = key.value.replace("-", "_")
        if name in seen:
            raise UsageError(f"{where}: {key.value} stands in line {seen[name]} already")
        seen[name] = line
        yield name, _Entry(where, node)


def _value(option: Option, entry: _Entry) -> Any:
    label, node = f"{entry.where}: {option.key}", entry.node
    if option.kind is Mapping:
        if _is_null(node):
            return {}
        if node.id != "mapping":
            raise UsageError(f"{label} must be {option.expected}, got {_described(node)}")
        path = entry.where.rpartition(":")[0]
        return {name: _argument(one) for name, one in _entries(node, path)}
    value = _scalar(option, label, node)
    option.require(value, label)
    return value


def _scalar(option: Option, label: str, node: Any) -> Any:
    if _is_null(node):
        if option.may_be_unset:
            return None
    elif _is_text(node) and (node.style is None or option.kind in (str, Path)):
        try:
            return read_text(option.kind, node.value)
        except ValueError:
            pass
    raise UsageError(f"{label} must be {option.expected}, got {_described(node)}")


def _argument(entry: _Entry) -> Any:
    """Return an argument of the recipe as text or a list of texts; the recipe checks its type."""
    is_list = entry.node.id == "sequence" and entry.node.tag in _TAGS
    parts = entry.node.value if is_list else [entry.node]
    for node in parts:
        if not _is_text(node):
            raise UsageError(
                f"{entry.where}: an argument must be one value or a list of values, got "
                f"{_described(node)}"
            )
    texts = [None if _is_null(node) else str(node.value) for node in parts]
    return texts if is_list else texts[0]


def _is_text(node: Any) -> bool:
    return node.id == "scalar" and node.tag in _TAGS


def _is_null(node: Any) -> bool:
    return _is_text(node) and node.style is None and node.value in _NULLS


def _described(node: Any) -> str:
    """Describe a value for an error message."""
    if node.tag not in _TAGS:
        return f"the tag {shorten(node.tag)}"
    if node.id != "scalar":
        return "a list" if node.id == "sequence" else "names with values"
    if node.style is None:
        return shorten(node.value) if node.value else "nothing"
    return f"the quoted text {shorten(node.value)}"
