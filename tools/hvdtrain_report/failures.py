"""Ranks that ended, left or joined while the others continued: marks in the plots, and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain_report.lines import JsonObject, number

COLUMNS = (
    *("step", "ranks lost", "reason", "ranks left", "continued after"),
    *("samples per step", "learning rate"),
)
JOIN_COLUMNS = (
    *("step", "ranks joined", "ranks then", "started in", "others waited"),
    *("samples per step", "learning rate"),
)


@dataclass(frozen=True)
class Change:
    """Ranks that ended or joined while the others continued; what is unknown is NaN."""

    step: float
    epoch: float
    seconds: float
    texts: tuple[str, ...]


def read_changes(summary: JsonObject | None, name: str) -> list[Change]:
    """Return the "failures" or "joins" of a summary; runs of earlier versions have none."""
    found = (summary or {}).get(name)
    return [
        Change(
            _number(entry, "step"),
            _number(entry, "epoch"),
            _number(entry, "trained_seconds"),
            (
                _text(entry, "step", ".0f"),
                *(_failure(entry) if name == "failures" else _join(entry)),
                _text(entry, "global_batch_size", ".0f"),
                _text(entry, "scaled_lr", ".4g"),
            ),
        )
        for entry in (found if isinstance(found, list) else [])
        if isinstance(entry, Mapping)
    ]


def _failure(entry: Mapping[str, object]) -> tuple[str, ...]:
    return (
        _ranks(entry, "lost"),
        "asked to leave" if entry.get("left") is True else "ended",
        _text(entry, "ranks", ".0f"),
        _seconds(entry, "seconds"),
    )


def _join(entry: Mapping[str, object]) -> tuple[str, ...]:
    return (
        _ranks(entry, "joined"),
        _text(entry, "ranks", ".0f"),
        _seconds(entry, "start_seconds"),
        _seconds(entry, "seconds"),
    )


def _number(entry: Mapping[str, object], name: str) -> float:
    found = number(entry.get(name))
    return math.nan if found is None else found


def _text(entry: Mapping[str, object], name: str, form: str) -> str:
    value = _number(entry, name)
    return format(value, form) if math.isfinite(value) else ""


def _seconds(entry: Mapping[str, object], name: str) -> str:
    text = _text(entry, name, ".2f")
    return f"{text} s" if text else ""


def _ranks(entry: Mapping[str, object], name: str) -> str:
    found = entry.get(name)
    return ", ".join(map(str, found)) if isinstance(found, list) else ""
