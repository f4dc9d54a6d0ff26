"""Ranks that ended, or left, while the others went on: marks in the plots, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.report.lines import JsonObject, number

__all__ = ["COLUMNS", "Failure", "read_failures"]

COLUMNS = (
    *("step", "ranks lost", "reason", "ranks left", "went on after"),
    *("samples per step", "learning rate"),
)


@dataclass(frozen=True)
class Failure:
    """Ranks that ended while the others went on; what is unknown is NaN.

    Attributes:
        step: steps done by then.
        epoch: epochs done by then.
        seconds: seconds of training by then.
        texts: text for each of COLUMNS.
    """

    step: float
    epoch: float
    seconds: float
    texts: tuple[str, ...]


def read_failures(summary: JsonObject | None) -> list[Failure]:
    """Return the failures that a summary lists; runs of earlier versions have none.

    Args:
        summary: content of summary.json; None without that file.
    """
    found = (summary or {}).get("failures")
    entries = found if isinstance(found, list) else []
    return [_failure(entry) for entry in entries if isinstance(entry, Mapping)]


def _failure(entry: Mapping[str, object]) -> Failure:
    lost = entry.get("lost")
    seconds = _text(entry, "seconds", ".2f")
    return Failure(
        _number(entry, "step"),
        _number(entry, "epoch"),
        _number(entry, "trained_seconds"),
        (
            _text(entry, "step", ".0f"),
            ", ".join(map(str, lost)) if isinstance(lost, list) else "",
            "asked to leave" if entry.get("left") is True else "ended",
            _text(entry, "ranks", ".0f"),
            f"{seconds} s" if seconds else "",
            _text(entry, "global_batch_size", ".0f"),
            _text(entry, "scaled_lr", ".4g"),
        ),
    )


def _number(entry: Mapping[str, object], name: str) -> float:
    found = number(entry.get(name))
    return math.nan if found is None else found


def _text(entry: Mapping[str, object], name: str, form: str) -> str:
    value = _number(entry, name)
    return format(value, form) if math.isfinite(value) else ""
