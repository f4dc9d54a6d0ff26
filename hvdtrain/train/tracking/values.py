"""Values for trackers by name, from the lines of metrics.jsonl and ranks.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_NOT_METRICS = {"epoch", "step", "split", "seconds"}
_NOT_OF_RANKS = {"step", "seconds", "span"}
# With more ranks, a tracker would have thousands of curves.
_MOST_RANKS = 16


def metric_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line of metrics.jsonl: "epoch", and SPLIT/NAME for each number.

    A null, which stands for a value that was not finite, becomes NaN; lists are omitted.
    """
    values = {"epoch": float(line["epoch"])}
    for name, value in line.items():
        if name not in _NOT_METRICS and (value is None or isinstance(value, int | float)):
            values[f"{line['split']}/{name}"] = math.nan if value is None else float(value)
    return values


def rank_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line of ranks.jsonl: system/NAME/rank_R for each rank.

    With more than 16 ranks: system/NAME/mean, /min and /max. Values that no rank knows are omitted.
    """
    values: dict[str, float] = {}
    for name, figures in line.items():
        if name in _NOT_OF_RANKS or not isinstance(figures, list):
            continue
        known = {rank: float(value) for rank, value in enumerate(figures) if value is not None}
        if len(figures) <= _MOST_RANKS:
            values |= {f"system/{name}/rank_{rank}": value for rank, value in known.items()}
        elif known:
            values[f"system/{name}/mean"] = sum(known.values()) / len(known)
            values[f"system/{name}/min"] = min(known.values())
            values[f"system/{name}/max"] = max(known.values())
    return values
