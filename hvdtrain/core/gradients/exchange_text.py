"""Exchanges in text such as "powersgd:rank=4": names, options and their values."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from hvdtrain.core.gradients.exchange import Exchange

__all__ = ["ExchangeOption", "Option", "options_of", "parse_exchange"]

Option = bool | int | float | str
_KINDS = (bool, int, float, str)


@dataclass(frozen=True)
class ExchangeOption:
    """An option of an exchange in text.

    Attributes:
        name: name, as in "powersgd:rank=4".
        kind: bool, int, float or str.
        default: value without it; None if there is none.
        required: whether it must be given.
    """

    name: str
    kind: type[Option]
    default: Option | None
    required: bool = False


def options_of(made: type[Exchange]) -> dict[str, ExchangeOption]:
    """Return the arguments of a class that are numbers, text or bool, by name."""
    hints = get_type_hints(made.__init__)
    options = {}
    for key, value in inspect.signature(made).parameters.items():
        required = value.default is value.empty
        kinds = [kind for kind in (hints[key], *get_args(hints[key])) if kind in _KINDS]
        if kinds:
            default = None if required else value.default
            options[key] = ExchangeOption(key, kinds[0], default, required)
    return options


def parse_exchange(
    text: str, known: Mapping[str, type[Exchange]], common: Mapping[str, ExchangeOption]
) -> tuple[type[Exchange], dict[str, Option]]:
    """Return the class that text names, and the options given for it."""
    name, _, given = text.partition(":")
    if name not in known:
        raise ValueError(f"exchange {text!r}: the name must be one of {', '.join(known)}")
    made = known[name]
    return made, _parse(text, given, {**options_of(made), **common})


def _parse(text: str, given: str, known: Mapping[str, ExchangeOption]) -> dict[str, Option]:
    """Return the options of a text; `given` is its part after the colon."""
    options: dict[str, Option] = {}
    for pair in filter(None, given.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            raise ValueError(
                f"exchange {text!r}: options are key=value with one of {', '.join(known)}, "
                f"got {pair!r}"
            )
        if key in options:
            raise ValueError(f"exchange {text!r}: {key} is given twice")
        options[key] = _convert(text, known[key], value)
    needed = [key for key, option in known.items() if option.required]
    if lacking := [key for key in needed if key not in options]:
        raise ValueError(f"exchange {text!r}: needs {', '.join(lacking)}=")
    return options


def _convert(text: str, option: ExchangeOption, value: str) -> Option:
    if option.kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"exchange {text!r}: {option.name} must be true or false, got {value}")
        return value.lower() == "true"
    try:
        return option.kind(value)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[option.kind]
        raise ValueError(f"exchange {text!r}: {option.name} must be {kind}, got {value}") from None
