"""Tables of what killed processes cost."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from hvdtrain_bench.analysis.kills import KillSummary, summary_of
from hvdtrain_bench.harness.results import Result

_TIMES = ("", "median", "95 %", "least", "most")
_COSTS = ("", "went on", "time lost", "taken again", "counted twice", "left out")


def kill_tables(result: Result) -> Iterator[Table]:
    """Yield a table that compares the libraries, and one of times for each of them."""
    summaries = {case.name: summary_of(case) for case in result.cases}
    table = _table(f"one of {result.ranks} processes killed: samples and time", _COSTS)
    for case in result.cases:
        table.add_row(case.name, *_costs(summaries[case.name]))
    yield table
    for name, summary in summaries.items():
        table = _table(name, _TIMES)
        for title, times in summary.times.items():
            cells = (times.median, times.late, times.least, times.most)
            table.add_row(title, *(f"{seconds:.3f} s" for seconds in cells))
        yield table


def _costs(summary: KillSummary) -> tuple[str, ...]:
    times = next(iter(summary.times.values()))
    lost = f"{times.median:.2f} s ({times.least:.2f} to {times.most:.2f})"
    went_on = f"{summary.survived} of {summary.kills}"
    return went_on, lost, f"{summary.again:g}", str(summary.twice), str(summary.lost)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold")
