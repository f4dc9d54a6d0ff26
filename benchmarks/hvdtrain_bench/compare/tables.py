"""A comparison's two tables, for the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdtrain_bench.compare.rows import Ratio, Row, SampleCount
from hvdtrain_bench.harness.text import console, interval_text, table_of, time_text

_UNKNOWN = "-"


def bytes_text(nbytes: float | None) -> str:
    """Return a number of bytes with its unit, in powers of 1000."""
    if nbytes is None:
        return _UNKNOWN
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def ratio_text(ratio: Ratio) -> str:
    """Return a ratio, with the smallest and the largest of the repeats if there are several."""
    if ratio.low == ratio.high:
        return f"{ratio.middle:.2f}"
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def difference_text(difference: float | None) -> str:
    """Return a difference of weights; 0 where all are bitwise equal."""
    if difference is None:
        return _UNKNOWN
    return "0" if difference == 0 else f"{difference:.1e}"


def score_text(name: str, value: float) -> str:
    """Return a score; a metric is a share, the loss is not."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if name == "loss" else f"{100 * value:.2f} %"


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


def print_tables(rows: Sequence[Row]) -> None:
    """Print the times and the results of all contenders that have run, and why others have not."""
    terminal = console()
    ran = [row for row in rows if not row.failure]
    if ran:
        base = rows[0]
        times = [time_cells(row, base) for row in ran]
        terminal.print(table_of("time and cost", time_columns(base.label), times))
        terminal.print(table_of("what was computed", result_columns(ran), map(result_cells, ran)))
    for row in rows:
        for line in (row.failure, *row.notes):
            if line:
                terminal.print(f"{row.label}: {line}", markup=False, soft_wrap=True)
