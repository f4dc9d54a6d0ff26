"""Tables in the terminal, and how times are written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH = 120


def console() -> Console:
    """Return what prints on stdout; without a terminal, tables have a fixed width."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def table_of(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    right: bool = True,
) -> Table:
    """Return a table; columns that have a title, but the first, are aligned on the right."""
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(table.columns):
        column.justify = "right" if right and number and column.header else "left"
    for cells in rows:
        table.add_row(*cells)
    return table


_UNITS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))
_MOST = 999.95  # of a unit, written with four digits


def time_text(seconds: float | None) -> str:
    """Return a time with its unit: "812 us", "3.412 ms", "2.5 s"; "-" if it is not known."""
    return "-" if seconds is None else interval_text(seconds, seconds)


def interval_text(low: float, high: float) -> str:
    """Return an interval of times in one unit: "3.1 to 3.524 ms"."""
    unit, size = next(one for one in _UNITS if high < one[1] * _MOST or one is _UNITS[-1])
    return f"{ends_text(low / size, high / size)} {unit}"


def ends_text(low: float, high: float) -> str:
    """Return both ends of an interval, or the number if they are equal."""
    texts = [f"{end:.4g}" if end < _MOST else f"{end:.0f}" for end in (low, high)]
    return " to ".join(dict.fromkeys(texts))
