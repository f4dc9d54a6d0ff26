"""What a person wants to know first about a run: who trained, how long, and what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.report.lines import number
from hvdtrain.report.run import Run

__all__ = ["facts", "final_split"]

_SPLITS = ("test", "train", "step")
_SPEED = ("lr", "samples_per_second")


def facts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return by label one text for each run; labels that no run knows are left out."""
    rows: dict[str, list[str]] = {}
    for metric in _metrics(runs):
        rows[metric] = [_final(run, metric) for run in runs]
    rows["samples/s"] = [_rate(run) for run in runs]
    rows["time"] = [_duration(_seconds(run)) for run in runs]
    rows["epochs"] = [_short(_epochs(run)) for run in runs]
    rows["ranks"] = [
        _text(_of(run, "world_size") or (run.ranks and run.ranks.ranks)) for run in runs
    ]
    for label, key in (
        ("hosts", "hosts"),
        ("global batch", "global_batch_size"),
        ("framework", "framework"),
        ("engine", "engine"),
        ("ended by", "ended"),
    ):
        rows[label] = [_text(_of(run, key)) for run in runs]
    return {label: texts for label, texts in rows.items() if any(texts)}


def final_split(run: Run) -> str | None:
    """Return the split whose last values count as the run's result."""
    known = run.measured.last
    return next((s for s in _SPLITS if s in known), next(iter(known), None))


def _metrics(runs: Sequence[Run]) -> list[str]:
    found: dict[str, None] = {}
    for run in runs:
        found |= dict.fromkeys(run.measured.last.get(final_split(run) or "", ()))
    return [name for name in found if name not in _SPEED]


def _final(run: Run, metric: str) -> str:
    value = run.measured.last.get(final_split(run) or "", {}).get(metric)
    return "" if value is None else _short(value)


def _rate(run: Run) -> str:
    """Return the whole run's rate; of a run without a summary, the last training epoch's."""
    known = _of(run, "samples_per_second")
    last = run.measured.last
    found = known or next(
        (
            last[split]["samples_per_second"]
            for split in ("train", "step")
            if "samples_per_second" in last.get(split, {})
        ),
        None,
    )
    rate = number(found)
    return "" if rate is None or not math.isfinite(rate) else f"{rate:,.0f}"


def _seconds(run: Run) -> float:
    known = (run.summary or {}).get("seconds")
    total = number(known.get("total")) if isinstance(known, Mapping) else None
    if total is not None and math.isfinite(total):
        return total
    ends = [curve.seconds[-1] for curve in run.measured.curves]
    return max((end for end in ends if math.isfinite(end)), default=math.nan)


def _epochs(run: Run) -> float:
    return max((curve.epoch[-1] for curve in run.measured.curves), default=math.nan)


def _of(run: Run, key: str) -> Any:
    """Return what the summary says; where it says nothing, the environment or the options."""
    for found in (run.summary, run.environment, run.config):
        if found and not isinstance(found.get(key), dict | list | None):
            return found[key]
    return None


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _short(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "not finite"


def _text(value: object) -> str:
    return "" if value is None else str(value)
