"""Lays the settings of several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Row", "side_by_side"]

_ABSENT = "-"
# Of a text in a cell: lists have one value for each rank.
_LONGEST = 240


@dataclass(frozen=True)
class Row:
    """One setting: its dotted name, its text for each run, and whether the runs differ in it."""

    name: str
    texts: list[str]
    differs: bool


def side_by_side(settings: Sequence[Mapping[str, Any] | None], mark: bool = True) -> list[Row]:
    """Return one row for each setting that any run has.

    Args:
        settings: of each run; None where it has none.
        mark: whether rows say that the runs differ in them.
    """
    flat = [dict(_flat("", found)) if found else {} for found in settings]
    # A dictionary keeps the order in which names are first met.
    names = {name: None for found in flat for name in found}
    # A run without the file differs in nothing that can be told.
    known = [found for found in flat if found]
    return [
        Row(
            name,
            [_short(found.get(name, _ABSENT)) for found in flat],
            mark and len({found.get(name) for found in known}) > 1,
        )
        for name in names
    ]


def _flat(prefix: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{name}.", value)
        else:
            yield name, _text(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
