"""The page of a comparison: tables, charts, and what each contender changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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

_WIDTH, _LEFT, _RIGHT = 720, 190, 110
_ROW, _TOP, _BOTTOM = 30, 6, 34
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


def chart(
    title: str, marks: Sequence[Mark], text: Callable[[float], str], logarithmic: bool = False
) -> str:
    """Return a chart as an SVG element."""
    values = [v for mark in marks for v in (mark.value, mark.high or 0.0, *mark.points)]
    ticks = log_ticks(values) if logarithmic else linear_ticks(values)
    height = _TOP + _ROW * len(marks) + _BOTTOM
    place = _place(ticks, logarithmic)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    for tick in ticks:
        x, bottom = place(tick), _TOP + _ROW * len(marks)
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        label = escape(text(tick))
        parts.append(f'<text class="scale" x="{x:.1f}" y="{bottom + 18}">{label}</text>')
    for number, mark in enumerate(marks):
        parts += _row(number, mark, place)
    return "".join([*parts, "</svg>"])


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


def _place(ticks: Sequence[float], logarithmic: bool) -> Callable[[float], float]:
    """Return where values lie between the first tick and the last."""

    def scaled(value: float) -> float:
        if not logarithmic:
            return value
        return math.log10(value if value > 0 else ticks[0])

    first, last, width = scaled(ticks[0]), scaled(ticks[-1]), _WIDTH - _LEFT - _RIGHT
    return lambda value: _LEFT + width * (scaled(value) - first) / (last - first)


def _row(number: int, mark: Mark, place: Callable[[float], float]) -> list[str]:
    top, end = _TOP + _ROW * number, place(mark.value)
    middle = top + _ROW / 2
    parts = [
        f'<text class="label" x="{_LEFT - 10}" y="{middle + 4}">{escape(mark.label)}</text>',
        f'<rect class="bar fill-{number % 6}" x="{_LEFT}" y="{top + 7}" height="{_ROW - 14}" '
        f'width="{max(0.0, end - _LEFT):.1f}"/>',
    ]
    right = end
    if mark.low is not None and mark.high is not None:
        low, right = place(mark.low), max(end, place(mark.high))
        parts.append(
            f'<line class="interval" x1="{low:.1f}" x2="{place(mark.high):.1f}" '
            f'y1="{middle}" y2="{middle}"/>'
        )
    parts += [
        f'<circle class="point" cx="{place(p):.1f}" cy="{middle}" r="3"/>' for p in mark.points
    ]
    parts.append(
        f'<text class="value" x="{right + 8:.1f}" y="{middle + 4}">{escape(mark.text)}</text>'
    )
    return parts


def write_page(path: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> int:
    """Write the page, and return its size in bytes."""
    from markupsafe import Markup

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
        charts={
            "time": [(title, Markup(svg)) for title, svg in _time_charts(ran)],
            "results": [(title, Markup(svg)) for title, svg in _result_charts(ran)],
        },
        notes=[(row.label, note) for row in ran for note in row.notes],
        facts=[(name, str(value)) for name, value in about.items()],
    )
    return write_document(path, page)


def _own(name: str) -> str:
    return files("hvdtrain_bench.compare").joinpath(name).read_text(encoding="utf-8")


def _time_charts(ran: Sequence[Row]) -> list[tuple[str, str]]:
    steps = [
        Mark(row.label, step.seconds, time_text(step.seconds), step.low, step.high, step.repeats)
        for row in ran
        if (step := row.step) is not None
    ]
    memory = _marks(((row.label, row.memory_bytes) for row in ran), bytes_text)
    sent = _marks(((row.label, row.socket_bytes) for row in ran), bytes_text)
    return [
        ("Time of a step, with its interval and each repeat", chart("steps", steps, time_text)),
        ("Most memory of a process", chart("memory", memory, bytes_text)),
        ("Sent through sockets in a step", chart("bytes sent", sent, bytes_text)),
    ]


def _result_charts(ran: Sequence[Row]) -> list[tuple[str, str]]:
    found = [(row.label, row.difference) for row in ran if row.difference is not None]
    if not found:
        return []
    checked = _marks(((label, one.checked) for label, one in found), difference_text)
    final = _marks(((label, one.final) for label, one in found), difference_text)
    return [
        (
            f"Largest difference of a weight from one process, {when}",
            chart("differences", marks, difference_text, True),
        )
        for when, marks in ((f"after {found[0][1].steps} steps", checked), ("at the end", final))
    ]


def _marks(values: Iterable[tuple[str, float | None]], text: Callable[[float], str]) -> list[Mark]:
    return [
        Mark(label, number, text(number))
        for label, number in values
        if number is not None and math.isfinite(number)
    ]
