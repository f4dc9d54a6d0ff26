"""Predicted scaling as text: links, steps, tables of predictions, and how they were checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from rich.table import Table

from hvdtrain_bench.harness.text import ends_text, interval_text, table_of
from hvdtrain_bench.scaling.paper import COVERAGE, PredictionInterval, StepPrediction, interval_of
from hvdtrain_bench.scaling.predictions import Check, Steps
from hvdtrain_bench.scaling.scheme import AVERAGE, Link, Scheme

_CHECK_COLUMNS = ("", "exchange", "ranks", "predicted", "measured", "error", "turns inside")
_PHASES = {
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "copy_seconds": "copies into buckets",
    "optimizer_seconds": "optimizer",
    "jitter_seconds": "ranks differ by",
}
_MICRO, _GIGA, _MEGA = 1e6, 1e-9, 1e-6


def scaling_lines(links: Sequence[Sequence[Link]], steps: Sequence[Steps]) -> Iterator[str]:
    """Yield what predictions are made from."""
    yield from map(_link, links)
    for each in steps:
        yield _work(each)
        yield from map(_scheme, filter(lambda scheme: scheme != AVERAGE, each.schemes))


def prediction_tables(
    found: Mapping[str, Mapping[str, Sequence[StepPrediction]]],
) -> Iterator[Table]:
    """Yield a table for each model and scheme: step and efficiency by the number of ranks."""
    for title, of_links in found.items():
        table = table_of(f"{title}: step and efficiency on paper", ("ranks", *of_links))
        for row in zip(*of_links.values(), strict=True):
            cells = (f"{_times(p.seconds)}, {_scaled(p.efficiency, 100, '%')}" for p in row)
            table.add_row(str(row[0].ranks), *cells)
        yield table


def check_table(checks: Sequence[Check]) -> Table:
    """Return the table that compares predictions with measurements."""
    table = table_of("predicted and measured here", _CHECK_COLUMNS)
    for check in checks:
        times = _times(check.predicted), _times(interval_of([check.seconds]))
        inside = f"{check.turns_inside} of {len(check.turns)}"
        error = f"{100 * check.error:+.1f} %"
        table.add_row(check.model, check.scheme, str(check.ranks), *times, error, inside)
    return table


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
