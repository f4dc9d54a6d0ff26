"""Options as YAML with a comment for each, which config/read.py can read again. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.train.options import OPTIONS, Option, TrainOptions

# Text that every YAML reader takes for text.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*|\d+ [a-z]+")
_NOT_TEXT = re.compile(r"(y|n|yes|no|on|off|true|false|null|\.?inf|\.?nan|\.[\d_.e+-]*)", re.I)
_COLUMN = 32


def config_text(options: TrainOptions) -> str:
    """Return all options in the format that --config reads."""
    return "".join(f"{line}\n" for line in _lines(options))


def _lines(options: TrainOptions) -> Iterator[str]:
    group = ""
    for option in OPTIONS:
        if option.group != group:
            yield from ([""] if group else []) + [f"# {option.group}"]
            group = option.group
        value = getattr(options, option.name)
        listed = isinstance(value, Mapping) and bool(value)
        start = f"{option.key}:" if listed else f"{option.key}: {_value(value)}"
        yield f"{start:{_COLUMN}} # {_comment(option)}"
        if listed:
            yield from (f"  {_scalar(name)}: {_value(one)}" for name, one in value.items())


def _comment(option: Option) -> str:
    default = f"by default: {option.declaration.unset}" if option.declaration.unset else ""
    choices = option.declaration.metavar if option.declaration.choices else ""
    return "; ".join(filter(None, [option.declaration.text.removesuffix("."), choices, default]))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_scalar, value))}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
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
    return f'"{"".join(map(_character, value))}"'


def _character(one: str) -> str:
    if one in '"\\':
        return f"\\{one}"
    if one.isprintable():
        return one
    code = ord(one)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
