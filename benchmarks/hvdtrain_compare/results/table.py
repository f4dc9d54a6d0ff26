"""The tables of a comparison on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from hvdtrain_compare.results.cells import result_cells, result_columns, time_cells, time_columns
from hvdtrain_compare.results.row import Row

_WIDTH = 120


def print_tables(rows: Sequence[Row]) -> None:
    """Print the times and the results of all contenders that have run, and why others have not."""
    # Without a terminal, tables have a fixed width.
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    ran = [row for row in rows if not row.failure]
    if ran:
        base = rows[0]
        times = [time_cells(row, base) for row in ran]
        console.print(_table("time and cost", time_columns(base.label), times))
        console.print(_table("what was computed", result_columns(ran), map(result_cells, ran)))
    for row in rows:
        if row.failure:
            console.print(f"{row.label}: {row.failure}", markup=False, soft_wrap=True)
        for note in row.notes:
            console.print(f"{row.label}: {note}", markup=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str], rows: Iterable[list[str]]) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(table.columns):
        column.justify = "right" if number and column.header else "left"
    for cells in rows:
        table.add_row(*cells)
    return table
