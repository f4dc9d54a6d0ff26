"""Results and predictions as text: tables of medians, ratios and intervals, and their spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from hvdtrain_bench.analysis.judge import (
    FUSED_LIMIT,
    HVDTRAIN,
    Figure,
    efficiencies,
    figures,
    is_trustworthy,
    late_of,
    rows,
)
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.harness.text import console, ends_text, interval_text, table_of, time_text
from hvdtrain_bench.many.measure import tables
from hvdtrain_bench.scaling.paper import (
    AVERAGE,
    COVERAGE,
    Link,
    PredictionInterval,
    Scheme,
    StepPrediction,
    interval_of,
)
from hvdtrain_bench.scaling.predictions import Check, Steps

_CHECK_COLUMNS = ("", "exchange", "ranks", "predicted", "measured", "error", "turns inside")
_PHASES = {
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "copy_seconds": "copies into buckets",
    "optimizer_seconds": "optimizer",
    "jitter_seconds": "ranks differ by",
}
_MICRO, _GIGA, _MEGA = 1e6, 1e-9, 1e-6


_PEER_COLUMNS = ("", "version", "threads of a rank", "cores")
_EFFICIENCY_COLUMNS = ("weak", "strong", "of the limit")
_TIME_COLUMNS = ("", "median", "95 %", "least", "most")
_COST_COLUMNS = ("", "went on", "time lost", "taken again", "counted twice", "left out")


class ConsoleReport:
    def __init__(self) -> None:
        self._console = console()

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def machine(self, machine: dict[str, Any]) -> None:
        packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
        gibibytes = machine["memory_bytes"] / 2**30
        self.line(
            f"hvdtrain {machine['hvdtrain']} benchmarks, {machine['date']}\n"
            f"  {machine['processor']}, {machine['cores']} cores, {gibibytes:.0f} GiB, "
            f"{machine['system']}\n"
            f"  Python {machine['python']}, {packages}"
        )

    def result(self, result: Result) -> None:
        self._peers(result)
        for case in result.cases:
            if case.base:
                self._case(case, result.ranks)
        self._figures(figures(result))

    def apart(self, together: Case, apart: Case, ranks: int) -> None:
        """Print what contenders took apart, and which quartiles have nothing in common."""
        self._case(apart, ranks)
        differ = []
        for row, other in zip(rows(together), rows(apart), strict=True):
            one, two = row.comparison, other.comparison
            if one and two and two.interval and (one.low > two.high or two.low > one.high):
                differ.append(f"{row.name} ({one.ratio:.2f}, apart {two.ratio:.2f})")
        self.line(f"{apart.name}: quartiles differ for {', '.join(differ) or 'none'}")

    def many(self, results: Sequence[Result]) -> None:
        for table in tables(results):
            self._console.print(table)

    def kills(self, result: Result) -> None:
        costs = [(case.name, *_costs_of(case)) for case in result.cases]
        title = f"one of {result.ranks} processes killed: samples and time"
        self._console.print(table_of(title, _COST_COLUMNS, costs))
        for case in result.cases:
            rows = [
                (stage, *(f"{s:.3f} s" for s in (median(v), late_of(v), min(v), max(v))))
                for stage, v in case.values.items()
            ]
            self._console.print(table_of(case.name, _TIME_COLUMNS, rows))
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
        for line in map(_link, links):
            self.line(line)
        for each in steps:
            self.line(_work(each))
            for scheme in each.schemes:
                if scheme != AVERAGE:
                    self.line(_scheme(scheme))
        for title, of_links in predictions.items():
            table = table_of(f"{title}: step and efficiency on paper", ("ranks", *of_links))
            for row in zip(*of_links.values(), strict=True):
                cells = (f"{_times(p.seconds)}, {_scaled(p.efficiency, 100, '%')}" for p in row)
                table.add_row(str(row[0].ranks), *cells)
            self._console.print(table)
        if not checks:
            return
        table = table_of("predicted and measured here", _CHECK_COLUMNS)
        for check in checks:
            times = _times(check.predicted), _times(interval_of([check.seconds]))
            inside = f"{check.turns_inside} of {len(check.turns)}"
            error = f"{100 * check.error:+.1f} %"
            table.add_row(check.model, check.scheme, str(check.ranks), *times, error, inside)
        self._console.print(table)
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
        gigabytes = _GIGA * case.about.get("bytes", 0)
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
            found, compared = row.comparison, ("1", "", "")
            if found is not None:
                spread = f"{found.low:.2f} to {found.high:.2f}"
                compared = (f"{found.ratio:.2f}", spread, row.verdict)
            table.add_row(row.name, time_text(row.median), *rate, *compared, *percents)
        self._console.print(table)
        if "gradient_bytes" in case.about:
            self.line(_roofline(case))
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


def _roofline(case: Case) -> str:
    """Return how long an average must take that reads and writes each gradient in memory once."""
    gradients, rate = case.about["gradient_bytes"], case.about["memory_bytes_per_second"]
    average = 2 * gradients / rate
    pairs = zip(case.values[HVDTRAIN], case.values[FUSED_LIMIT], strict=True)
    beyond = median(ours / (fused + average) for ours, fused in pairs)
    least = median(case.values[FUSED_LIMIT]) + average
    return (
        f"an average reads and writes {_MEGA * gradients:.0f} MB on each rank, in at least "
        f"{time_text(average)} at {_GIGA * rate:.1f} GB/s, as all ranks copy at once; this and a "
        f"fused step of each rank take {time_text(least)}, and {HVDTRAIN} {beyond:.2f} times that"
    )


def _costs_of(case: Case) -> tuple[str, ...]:
    """Return what kills cost with one library, in the words of the table.

    Of samples that were taken again it has the median, of others the most of a job.
    """
    failures, failed = case.about["failures"], case.about["failed"]
    times = next(iter(case.values.values()))
    again, twice, lost = ([one[name] for one in failures] for name in ("again", "twice", "lost"))
    return (
        f"{len(failures)} of {len(failures) + len(failed)}",
        f"{median(times):.2f} s ({min(times):.2f} to {max(times):.2f})",
        f"{median(again):g}",
        str(max(twice)),
        str(max(lost)),
    )


def check_line(checks: Sequence[Check]) -> str:
    """Return how often predicted intervals contain what was measured."""
    steps = sum(check.predicted.contains(check.seconds) for check in checks)
    inside = sum(check.turns_inside for check in checks)
    turns = sum(len(check.turns) for check in checks)
    return (
        f"{steps} of {len(checks)} measured steps, and {inside} of {turns} of their turns, lie in "
        f"the intervals, which are made to contain {100 * COVERAGE:.0f} % of the turns"
    )


def _link(values: Sequence[Link]) -> str:
    latency = interval_of([link.latency_seconds for link in values])
    bandwidth = interval_of([link.bytes_per_second for link in values])
    share = values[0].core_share
    taken = f", takes {100 * share:.0f} % of the core that computes" if share else ""
    return (
        f"{values[0].name}: {_scaled(latency, _MICRO, 'us')}, "
        f"{_scaled(bandwidth, _GIGA, 'GB/s')}{taken}"
    )


def _work(steps: Steps) -> str:
    phases = ", ".join(
        f"{title} {_times(interval_of([getattr(work, name) for work in steps.alone]))}"
        for name, title in _PHASES.items()
    )
    one = steps.alone[0]
    sizes = [nbytes for nbytes, _ in one.buckets]
    ratios = [
        work.compute_seconds / alone.compute_seconds
        for work, alone in zip(steps.works, steps.alone, strict=True)
    ]
    slower = f", {_scaled(interval_of(ratios), 1, 'times')} as long while communicating"
    return (
        f"{one.name}: {phases}, {_MEGA * sum(sizes):.1f} MB in {len(sizes)} buckets"
        f"{slower if median(ratios) != 1 else ''}"
    )


def _scheme(scheme: Scheme) -> str:
    if scheme.sharded:
        return f"  {scheme.name}: ranks share the optimizer's work and gather the weights"
    if scheme.period > 1:
        return f"  {scheme.name}: weights are averaged every {scheme.period} steps"
    nodes = f" + {100 * scheme.rate_per_node:.3g} % for each node" if scheme.rate_per_node else ""
    return (
        f"  {scheme.name}: sends {100 * scheme.rate:.3g} %{nodes}, in {scheme.calls:g} collectives "
        f"for a bucket, after {1 / scheme.seconds_per_byte * _GIGA:.2f} GB/s of computation"
    )


def _times(seconds: PredictionInterval) -> str:
    return interval_text(seconds.low, seconds.high)


def _scaled(found: PredictionInterval, factor: float, unit: str) -> str:
    return f"{ends_text(factor * found.low, factor * found.high)} {unit}"
