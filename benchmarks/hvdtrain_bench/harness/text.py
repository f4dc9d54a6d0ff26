"""Tables in the terminal."""

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
