"""Values parsed from text that a user wrote, and words for messages. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Some parsers read numbers with leading zeros as octal, others as decimal.
_INTEGER = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
_FLOAT = re.compile(
    r"[+-]?(((0|[1-9](_?[0-9])*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|\.?inf|\.?nan)", re.IGNORECASE
)
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LONGEST_SHOWN = 60


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise ValueError(text)
    return float(re.sub(r"\.(?=inf|nan)", "", text, flags=re.IGNORECASE))


def _bool(text: str) -> bool:
    if text.lower() not in _BOOLS:
        raise ValueError(text)
    return _BOOLS[text.lower()]


_READERS: Mapping[Any, Callable[[str], Any]] = {
    bool: _bool,
    int: _integer,
    float: _float,
    str: str,
    Path: Path,
}


def read_text(kind: Any, text: str) -> Any:
    """Return the value of a type that a text represents."""
    return _READERS[kind](text)


def shorten(value: Any) -> str:
    """Return the repr of a value for error messages, cut to a length that fits a line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 4]} ..."


def counted(number: float, noun: str) -> str:
    """Return a number with a noun that goes with it: "1 epoch", "2 epochs", "0.5 epochs"."""
    return f"{round(number, 5):.15g} {noun}{'' if number == 1 else 's'}"
