"""The columns and the cells of a comparison's two tables, for the terminal and the page. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain_compare.figures.accounting import SampleCount
from hvdtrain_compare.figures.texts import (
    bytes_text,
    difference_text,
    interval_text,
    ratio_text,
    score_text,
    time_text,
)
from hvdtrain_compare.results.row import Row


def time_columns(base: str) -> list[str]:
    """Return the titles of the columns of times."""
    return ["", "step", "interval", f"/ {base}", "", "epoch", "memory", "sent", "lines"]


def time_cells(row: Row, base: Row) -> list[str]:
    """Return the cells of a contender that has run."""
    assert row.step is not None
    ratio = "1" if row is base else "-" if row.ratio is None else ratio_text(row.ratio)
    return [
        row.label,
        time_text(row.step.seconds),
        interval_text(row.step.low, row.step.high),
        ratio,
        row.verdict,
        time_text(row.epoch_seconds),
        bytes_text(row.memory_bytes),
        bytes_text(row.socket_bytes),
        str(row.lines),
    ]


def result_columns(ran: Sequence[Row]) -> list[str]:
    """Return the titles of the columns of results."""
    steps = next((row.difference.steps for row in ran if row.difference is not None), 0)
    scores = list(ran[0].scores or {}) if ran else []
    return ["", f"|w - w'|, {steps} steps", "at the end", "trained", "evaluated", *scores]


def result_cells(row: Row) -> list[str]:
    """Return the cells of a contender that has run."""
    difference = row.difference
    return [
        row.label,
        difference_text(None if difference is None else difference.checked),
        difference_text(None if difference is None else difference.final),
        _count_text(row.trained),
        _count_text(row.evaluated),
        *(score_text(name, value) for name, value in (row.scores or {}).items()),
    ]


def _count_text(count: SampleCount | None) -> str:
    return "-" if count is None else count.text
