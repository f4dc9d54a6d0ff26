"""The page of a comparison: tables, charts, and what each contender changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvdtrain_report.document import asset, own_script, render, write_document

from hvdtrain_bench.compare.rows import Row
from hvdtrain_bench.compare.tables import (
    bytes_text,
    difference_text,
    result_cells,
    result_columns,
    time_cells,
    time_columns,
)
from hvdtrain_bench.harness.text import time_text

_TICKS = 5


@dataclass(frozen=True)
class Mark:
    """One contender in a chart."""

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
