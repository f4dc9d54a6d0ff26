"""Files of options: read with the line of each mistake, and written so that they can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError, did_you_mean
from hvdtrain.train.option import KINDS, Option
from hvdtrain.train.options import OPTIONS, TrainOptions, key_of_name_elsewhere

_LONGEST_SHOWN = 60


def shorten(value: Any) -> str:
    """Return the repr of a value for error messages, cut to a length that fits a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 4]} ..."


def counted(number: float, noun: str) -> str:
    """Return a number with a noun that goes with it: "1 epoch", "2 epochs", "0.5 epochs"."""
    return f"{round(number, 5):.15g} {noun}{'' if number == 1 else 's'}"


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
    values: dict[str, Any] = {}
    # PyYAML only composes nodes: nothing in the file is constructed or run.
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
    for name, where, node in _entries(root, str(path)):
        option = _BY_NAME.get(name)
        if option is None:
            near = did_you_mean(
                key_of_name_elsewhere(name) or name.replace("_", "-"), [one.key for one in OPTIONS]
            )
            raise UsageError(f"{where}: no option {shorten(name)}{near} {_HINT}")
        values[name] = _value(option, where, node)
    return values


def _entries(mapping: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the name with `_` for `-`, the place and the node of each entry of a mapping."""
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
        yield name, where, node


def _value(option: Option, where: str, node: Any) -> Any:
    label = f"{where}: {option.key}"
    if option.kind is Mapping:
        if _is_null(node):
            return {}
        if node.id == "mapping":
            return {n: _argument(*one) for n, *one in _entries(node, where.rpartition(":")[0])}
    elif _is_null(node):
        if option.may_be_unset:
            return None
    elif _is_text(node) and (node.style is None or option.kind in (str, Path)):
        try:
            value = KINDS[option.kind].read(node.value)
        except ValueError:
            pass
        else:
            option.require(value, label)
            return value
    raise UsageError(f"{label} must be {option.expected}, got {_described(node)}")


def _argument(where: str, node: Any) -> Any:
    """Return an argument of the recipe as text or a list of texts; the recipe checks its type."""
    is_list = node.id == "sequence" and node.tag in _TAGS
    parts = node.value if is_list else [node]
    for part in parts:
        if not _is_text(part):
            raise UsageError(
                f"{where}: an argument must be one value or a list of values, got "
                f"{_described(part)}"
            )
    texts = [None if _is_null(part) else str(part.value) for part in parts]
    return texts if is_list else texts[0]


def _is_text(node: Any) -> bool:
    return node.id == "scalar" and node.tag in _TAGS


def _is_null(node: Any) -> bool:
    return _is_text(node) and node.style is None and node.value in _NULLS


def _described(node: Any) -> str:
    if node.tag not in _TAGS:
        return f"the tag {shorten(node.tag)}"
    if node.id != "scalar":
        return "a list" if node.id == "sequence" else "names with values"
    if node.style is None:
        return shorten(node.value) if node.value else "nothing"
    return f"the quoted text {shorten(node.value)}"


# Text that every YAML reader takes for text.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*|\d+ [a-z]+")
_NOT_TEXT = re.compile(r"(y|n|yes|no|on|off|true|false|null|\.?inf|\.?nan|\.[\d_.e+-]*)", re.I)
_COLUMN = 32


def config_text(options: TrainOptions) -> str:
    """Return all options in the format that --config reads."""
    lines: list[str] = []
    group = ""
    for option in OPTIONS:
        if option.group != group:
            lines += [*([""] if group else []), f"# {option.group}"]
            group = option.group
        value = getattr(options, option.name)
        listed = isinstance(value, Mapping) and bool(value)
        start = f"{option.key}:" if listed else f"{option.key}: {_written_value(value)}"
        lines.append(f"{start:{_COLUMN}} # {_comment(option)}")
        if listed:
            lines += [f"  {_written_scalar(n)}: {_written_value(one)}" for n, one in value.items()]
    return "".join(f"{line}\n" for line in lines)


def _comment(option: Option) -> str:
    default = f"by default: {option.unset}" if option.unset else ""
    choices = option.metavar if option.choices else ""
    return "; ".join(filter(None, [option.text.removesuffix("."), choices, default]))


def _written_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written_scalar, value))}]"
    return _written_scalar(value)


def _written_scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _number(float(value))
    return _text(str(value))


def _number(value: float) -> str:
    """Return a number that every YAML reader takes for a number: 1.0e-05, not 1e-05."""
    text = repr(value)
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}.0e{power}" if exponent and "." not in mantissa else text


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value):
        return value
    shown = value.replace("\\", r"\\").replace('"', r"\"")
    # The escapes of Python are YAML's.
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return f'"{"".join(escaped)}"'
