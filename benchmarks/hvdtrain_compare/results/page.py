"""The page of a comparison: tables, charts, and what each contender changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvdtrain_report.document import asset, policy, write_document

from hvdtrain import __version__
from hvdtrain.errors import UsageError
from hvdtrain_compare.figures import bytes_text, difference_text, time_text
from hvdtrain_compare.results.charts import Mark, chart
from hvdtrain_compare.results.row import Row
from hvdtrain_compare.results.tables import result_cells, result_columns, time_cells, time_columns


def require_jinja() -> None:
    """Check that the page can be made."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise UsageError("compare needs Jinja2: pip install 'hvdtrain[report]'") from error


def write_page(path: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> int:
    """Write the page, and return its size in bytes."""
    return write_document(path, _render(about, rows))


def _render(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    ran = [row for row in rows if not row.failure]
    style = asset("page.css") + _own("compare.css")
    script = "(() => {\n'use strict';\n" + asset("format.js") + asset("theme.js") + "})();\n"
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_own("compare.html"))
    return template.render(
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
        style=Markup(style),
        scripts=[Markup(script)],
        policy=policy([style], [script]),
        version=__version__,
    )


def _own(name: str) -> str:
    return files("hvdtrain_compare.results").joinpath(name).read_text(encoding="utf-8")


def _time_charts(ran: Sequence[Row]) -> list[tuple[str, str]]:
    steps = [
        Mark(
            row.label,
            row.step.seconds,
            time_text(row.step.seconds),
            row.step.low,
            row.step.high,
            row.step.repeats,
        )
        for row in ran
        if row.step is not None
    ]
    memory = _marks(ran, lambda row: row.memory_bytes, bytes_text)
    sent = _marks(ran, lambda row: row.socket_bytes, bytes_text)
    return [
        ("Time of a step, with its interval and each repeat", chart("steps", steps, time_text)),
        ("Most memory of a process", chart("memory", memory, bytes_text)),
        ("Sent through sockets in a step", chart("bytes sent", sent, bytes_text)),
    ]


def _result_charts(ran: Sequence[Row]) -> list[tuple[str, str]]:
    compared = [row for row in ran if row.difference is not None]

    def checked(row: Row) -> float | None:
        return None if row.difference is None else row.difference.checked

    def final(row: Row) -> float | None:
        return None if row.difference is None else row.difference.final

    steps = next((row.difference.steps for row in compared if row.difference), 0)
    return [
        (
            f"Largest difference of a weight from one process, {when}",
            chart("differences", _marks(ran, value, difference_text), difference_text, True),
        )
        for when, value in ((f"after {steps} steps", checked), ("at the end", final))
        if compared
    ]


def _marks(
    ran: Sequence[Row], value: Callable[[Row], float | None], text: Callable[[float], str]
) -> list[Mark]:
    known = ((row.label, value(row)) for row in ran)
    return [
        Mark(label, number, text(number))
        for label, number in known
        if number is not None and math.isfinite(number)
    ]
