"""Tables of medians, ratios and their spread, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvdtrain_bench.analysis.judge import (
    ComparedContender,
    efficiencies,
    figures,
    is_trustworthy,
    rows,
)
from hvdtrain_bench.analysis.kills import kill_tables
from hvdtrain_bench.analysis.statistics import Figure
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.harness.text import console, table_of, time_text
from hvdtrain_bench.scaling.paper import StepPrediction
from hvdtrain_bench.scaling.predictions import Check, Steps
from hvdtrain_bench.scaling.report import check_line, check_table, prediction_tables, scaling_lines
from hvdtrain_bench.scaling.scheme import Link

_PEER_COLUMNS = ("", "version", "threads of a rank", "cores")
_EFFICIENCY_COLUMNS = ("weak", "strong", "of the limit")
_BYTES_PER_GIGABYTE = 1e9


class ConsoleReport:
    """Prints results on stdout."""

    def __init__(self) -> None:
        self._console = console()

    def line(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def machine(self, machine: dict[str, Any]) -> None:
        """Print the description of the machine."""
        packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
        gibibytes = machine["memory_bytes"] / 2**30
        self.line(
            f"hvdtrain {machine['hvdtrain']} benchmarks, {machine['date']}\n"
            f"  {machine['processor']}, {machine['cores']} cores, {gibibytes:.0f} GiB, "
            f"{machine['system']}\n"
            f"  Python {machine['python']}, {packages}"
        )

    def result(self, result: Result) -> None:
        """Print the contenders, a table for each case, and the figures."""
        self._peers(result)
        for case in result.cases:
            if case.base:
                self._case(case, result.ranks)
        self._figures(figures(result))

    def kills(self, result: Result) -> None:
        """Print what killed processes cost, and the figures."""
        for table in kill_tables(result):
            self._console.print(table)
        for case in result.cases:
            self.line(f"{case.name} needs {case.about['needs']}")
        self._skipped(result)
        self._figures(figures(result))

    def scaling(
        self,
        links: Sequence[Sequence[Link]],
        steps: Sequence[Steps],
        predictions: Mapping[str, Mapping[str, Sequence[StepPrediction]]],
        checks: Sequence[Check],
    ) -> None:
        """Print links, predictions by the number of ranks, and what was measured of them."""
        for line in scaling_lines(links, steps):
            self.line(line)
        for table in prediction_tables(predictions):
            self._console.print(table)
        if checks:
            self._console.print(check_table(checks))
            self.line(check_line(checks))

    def _peers(self, result: Result) -> None:
        nodes = f"{result.nodes} node{'s' * (result.nodes > 1)}"
        table = table_of(
            f"{result.kind}: {result.ranks} ranks on {nodes}", _PEER_COLUMNS, right=False
        )
        alike: dict[tuple[str, ...], list[str]] = {}
        for peer in result.peers:
            threads = f"{peer.torch_threads} of torch, {peer.threads} in all"
            alike.setdefault((peer.library, threads, peer.cores), []).append(peer.name)
        for facts, names in alike.items():
            table.add_row("\n".join(names), *facts, end_section=True)
        self._console.print(table)
        self._skipped(result)

    def _skipped(self, result: Result) -> None:
        for name, reason in result.skipped.items():
            self.line(f"without {name}: {reason}")

    def _case(self, case: Case, ranks: int) -> None:
        gigabytes = case.about.get("bytes", 0) / _BYTES_PER_GIGABYTE
        of_ranks = efficiencies(case, ranks)
        table = table_of(
            case.name,
            [
                *["", "median", *(["GB/s"] if gigabytes else []), f"/ {case.base}", "spread", ""],
                *(_EFFICIENCY_COLUMNS if of_ranks else ()),
            ],
        )
        for row in rows(case):
            rate = [f"{gigabytes / row.median:.2f}"] if gigabytes else []
            shares = of_ranks.get(row.name)
            parts = (shares.weak, shares.strong, shares.limit) if shares else ()
            percents = [f"{100 * part:.0f} %" for part in parts]
            table.add_row(row.name, time_text(row.median), *rate, *_compared(row), *percents)
        self._console.print(table)
        if not is_trustworthy(case):
            self.line(
                f"{case.name}: the same code differs from itself, so this run is too noisy to "
                "tell: repeat it on a quiet machine"
            )

    def _figures(self, found: Iterable[Figure]) -> None:
        table = table_of("figures", ("", "median", "spread", ""))
        for figure in found:
            verdict = figure.verdict
            if figure.met is not None:
                verdict = f"{verdict}: {'met' if figure.met else 'MISSED'}"
            spread = f"{figure.low:.3g} to {figure.high:.3g}" if figure.low < figure.high else ""
            table.add_row(figure.label, f"{figure.number:.3g} {figure.unit}", spread, verdict)
        if table.row_count:
            self._console.print(table)


def _compared(row: ComparedContender) -> tuple[str, str, str]:
    found = row.comparison
    if found is None:
        return "1", "", ""
    return f"{found.ratio:.2f}", f"{found.low:.2f} to {found.high:.2f}", row.verdict
