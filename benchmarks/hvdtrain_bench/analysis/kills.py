"""What killed processes cost with each library, in figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from hvdtrain_bench.analysis.figure import Figure, figure_of
from hvdtrain_bench.analysis.statistics import paired_ratios
from hvdtrain_bench.harness.results import Case, Result

KILLS, ELASTIC_STEPS = "kills", "elastic-steps"
NEW_STEP, NEXT_STEP = "kill to the end of the next new step", "kill to the end of the next step"
NOT_ELASTIC, NOT_ELASTIC_AGAIN, ELASTIC = "not elastic", "not elastic again", "elastic"
_MEDIAN_SECONDS, _LATE_SECONDS, _RATIO = 1.0, 3.0, 1.01
_LATE = 0.95
_OWN = "hvdtrain"


@dataclass(frozen=True)
class TimeSpread:
    """Times of all kills: the median, what 95 % of them do not exceed, and the extremes."""

    median: float
    late: float
    least: float
    most: float


@dataclass(frozen=True)
class KillSummary:
    """What kills cost with one library.

    Attributes:
        again: median of the samples that were taken again.
        twice: most samples of a job that count more than once in the final weights.
        lost: most samples of a job that do not count.
    """

    survived: int
    kills: int
    times: dict[str, TimeSpread]
    again: float
    twice: int
    lost: int


def summary_of(case: Case) -> KillSummary:
    """Return what the kills of a library cost."""
    failures, failed = case.about["failures"], case.about["failed"]
    return KillSummary(
        survived=len(failures),
        kills=len(failures) + len(failed),
        times={name: _spread(values) for name, values in case.values.items()},
        again=median(one["again"] for one in failures),
        twice=max(one["twice"] for one in failures),
        lost=max(one["lost"] for one in failures),
    )


def figures_of_kills(result: Result) -> Iterator[Figure]:
    """Yield the figures that have a target."""
    for case in result.cases:
        if case.name.startswith(_OWN):
            values = case.values[NEW_STEP]
            yield figure_of(f"{case.name}: {NEW_STEP}", values, "s", _MEDIAN_SECONDS)
            late = _spread(values).late
            label = f"{case.name}: {100 * _LATE:.0f} % of kills"
            yield figure_of(label, [late], "s", _LATE_SECONDS)


def figures_of_elastic_steps(result: Result) -> Iterator[Figure]:
    """Yield the time of a step of elastic jobs in those of others, and the latter in themselves."""
    for case in result.cases:
        base = case.values[NOT_ELASTIC]
        for name, target in ((NOT_ELASTIC_AGAIN, None), (ELASTIC, _RATIO)):
            ratios = paired_ratios(base, case.values[name])
            yield figure_of(f"{case.name}: {name} / {NOT_ELASTIC}", ratios, "x", target)


# By the kind of the result.
FIGURES_OF_ELASTIC = {KILLS: figures_of_kills, ELASTIC_STEPS: figures_of_elastic_steps}


def _spread(values: Sequence[float]) -> TimeSpread:
    ordered = sorted(values)
    late = ordered[ceil(_LATE * len(ordered)) - 1]
    return TimeSpread(median(ordered), late, ordered[0], ordered[-1])
