"""A comparison's two tables, for the terminal and the page, and the page with its charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvdtrain_report.document import asset, own_script, render, write_document

from hvdtrain_bench.compare.rows import Ratio, Row
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
    return ["", "step", "interval", f"/ {base}", "", "epoch", "memory", "sent", "lines"]


def time_cells(row: Row, base: Row) -> list[str]:
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
    steps = next((row.difference.steps for row in ran if row.difference is not None), 0)
    scores = list(ran[0].scores or {}) if ran else []
    return ["", f"|w - w'|, {steps} steps", "at the end", "trained", "evaluated", *scores]


def result_cells(row: Row) -> list[str]:
    difference = row.difference
    return [
        row.label,
        difference_text(None if difference is None else difference.checked),
        difference_text(None if difference is None else difference.final),
        *(count.text if count else _UNKNOWN for count in (row.trained, row.evaluated)),
        *(score_text(name, value) for name, value in (row.scores or {}).items()),
    ]


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


_TICKS = 5


@dataclass(frozen=True)
class Mark:
    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    points: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Contenders on one scale, as compare.html draws them."""

    title: str
    marks: Sequence[Mark]
    text: Callable[[float], str]  # how a value is written
    logarithmic: bool = False

    @cached_property
    def ticks(self) -> list[float]:
        """Round numbers, of which the last is at least the largest value."""
        values = [v for mark in self.marks for v in (mark.value, mark.high or 0.0, *mark.points)]
        return log_ticks(values) if self.logarithmic else linear_ticks(values)

    def place(self, value: float) -> float:
        """Return where a value lies between the first tick and the last, from 0 to 1."""
        first, last, own = map(self._scaled, (self.ticks[0], self.ticks[-1], value))
        return (own - first) / (last - first)

    def _scaled(self, value: float) -> float:
        return math.log10(value if value > 0 else self.ticks[0]) if self.logarithmic else value


def linear_ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers from 0 to at least the largest value."""
    largest = max([*values, 0.0]) or 1.0
    rough = largest / (_TICKS - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def log_ticks(values: Sequence[float]) -> list[float]:
    """Return powers of ten, of which the first is smaller than all values but 0."""
    positive = [value for value in values if value > 0] or [1.0]
    first = math.floor(math.log10(min(positive))) - 1
    last = math.ceil(math.log10(max(positive)))
    stride = max(1, math.ceil((last - first) / (_TICKS + 1)))
    return [10.0**power for power in range(first, last + stride, stride)]


def write_page(path: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> int:
    """Write the page, and return its size in bytes."""
    ran = [row for row in rows if not row.failure]
    page = render(
        _own("compare.html"),
        asset("page.css") + _own("compare.css"),
        [own_script("format.js", "theme.js")],
        about=about,
        rows=rows,
        ran=ran,
        failed=[row for row in rows if row.failure],
        columns={"time": time_columns(rows[0].label), "results": result_columns(ran)},
        cells={
            "time": [time_cells(row, rows[0]) for row in ran],
            "results": map(result_cells, ran),
        },
        charts={"time": _time_charts(ran), "results": _result_charts(ran)},
        notes=[(row.label, note) for row in ran for note in row.notes],
        facts=[(name, str(value)) for name, value in about.items()],
    )
    return write_document(path, page)


def _own(name: str) -> str:
    return files("hvdtrain_bench.compare").joinpath(name).read_text(encoding="utf-8")


def _time_charts(ran: Sequence[Row]) -> list[Chart]:
    steps = [
        Mark(row.label, step.seconds, time_text(step.seconds), step.low, step.high, step.repeats)
        for row in ran
        if (step := row.step) is not None
    ]
    memory = _marks(((row.label, row.memory_bytes) for row in ran), bytes_text)
    sent = _marks(((row.label, row.socket_bytes) for row in ran), bytes_text)
    return [
        Chart("Time of a step, with its interval and each repeat", steps, time_text),
        Chart("Most memory of a process", memory, bytes_text),
        Chart("Sent through sockets in a step", sent, bytes_text),
    ]


def _result_charts(ran: Sequence[Row]) -> list[Chart]:
    found = [(row.label, row.difference) for row in ran if row.difference is not None]
    if not found:
        return []
    title = "Largest difference of a weight from one process"
    checked = _marks(((label, one.checked) for label, one in found), difference_text)
    final = _marks(((label, one.final) for label, one in found), difference_text)
    when = f"after {found[0][1].steps} steps"
    return [
        Chart(f"{title}, {when}", checked, difference_text, logarithmic=True),
        Chart(f"{title}, at the end", final, difference_text, logarithmic=True),
    ]


def _marks(values: Iterable[tuple[str, float | None]], text: Callable[[float], str]) -> list[Mark]:
    return [
        Mark(label, number, text(number))
        for label, number in values
        if number is not None and math.isfinite(number)
    ]
