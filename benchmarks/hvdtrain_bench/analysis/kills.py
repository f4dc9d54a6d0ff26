"""What killed processes cost with each library: from notes, in figures and in tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from statistics import median

from rich.table import Table

from hvdtrain_bench.analysis.statistics import Figure, figure_of, paired_ratios
from hvdtrain_bench.harness.notes import BEGIN, END, WORLD, Note
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.harness.text import table_of


class UnfinishedJobError(Exception):
    """The job did not continue after the kill, or did not reach its end."""


@dataclass(frozen=True)
class Failure:
    """The cost of one killed process."""

    # Time from the kill to the end of the first step on samples that were not used before it, on
    # the last rank.
    seconds: float
    next_seconds: float  # time from the kill to the end of the first step after it, new or not
    stages: dict[str, float]  # time of each stage in between, if the library's notes tell it
    step_seconds: float
    again: int  # samples of steps that were complete, and taken again
    twice: int  # samples that have changed the final weights more than once, counted once more each
    lost: int  # samples that have never changed the final weights


@dataclass
class _Step:
    """A step of all ranks of a world."""

    samples: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    ranks: int = 0
    done: int = 0  # samples that are used after it, in the history of the weights

    @property
    def whole(self) -> bool:
        return len(self.ends) == self.ranks


def failure_of(
    notes: Mapping[int, Sequence[Note]],
    killed: float,
    samples: int,
    stages: Mapping[str, str],
    starts: Mapping[int, int],
) -> Failure:
    """Return what a kill cost.

    Stages have a title for each event that ends one, in order; the last ends with the next step.
    `starts` are samples that were used before the world of each number, where notes lack it.
    """
    starts, worlds = dict(starts), _worlds(notes)
    for lines in notes.values():
        for line in lines:
            if line["event"] == WORLD and line["done"] is not None:
                starts[line["generation"]] = line["done"]
    for number, steps in worlds.items():
        done = starts.get(number, 0)
        for step in steps:
            done += len(step.samples)
            step.done = done
    later = [step for number, steps in worlds.items() if number for step in steps if step.whole]
    reached = max((step.done for step in worlds[0] if step.ends), default=0)
    new = [step for step in later if step.done > reached]
    if not new or max(step.done for step in later) < samples:
        raise UnfinishedJobError("the job did not go on to its end after the kill")
    ends = sorted(max(step.ends) for step in worlds[0] if step.ends and max(step.ends) < killed)
    seconds = min(max(step.ends) for step in new) - killed
    again, used = _used(worlds, starts)
    return Failure(
        seconds=seconds,
        next_seconds=min(max(step.ends) for step in later) - killed,
        stages=_stages(notes, killed, stages, seconds),
        step_seconds=median(after - before for before, after in pairwise(ends)),
        again=again,
        twice=sum(count - 1 for count in used.values()),
        lost=samples - len(used),
    )


def _worlds(notes: Mapping[int, Sequence[Note]]) -> dict[int, list[_Step]]:
    """Return the steps of each world, in order."""
    found: dict[int, list[_Step]] = {}
    for lines in notes.values():
        steps: list[_Step] = []
        index, within = -1, False
        for line in lines:
            if line["event"] == WORLD:
                steps, index, within = found.setdefault(line["generation"], []), -1, False
            elif line["event"] == BEGIN:
                if not within:  # else another backward pass of the same step
                    index, within = index + 1, True
                    if index == len(steps):
                        steps.append(_Step())
                    steps[index].ranks += 1
                steps[index].samples += line["samples"]
            elif line["event"] == END:
                steps[index].ends.append(line["at"])
                within = False
    return found


def _used(
    worlds: Mapping[int, Sequence[_Step]], starts: Mapping[int, int]
) -> tuple[int, Counter[int]]:
    """Return how many samples of complete steps were taken again, and how often each counts."""
    used: Counter[int] = Counter()
    again = 0
    for number, steps in worlds.items():
        follows = [starts[later] for later in worlds if later > number]
        limit = min(follows, default=None)
        for step in steps:
            if limit is None or step.done <= limit:
                used.update(step.samples)
            elif step.ends:
                again += len(step.samples)
    return again, used


def _stages(
    notes: Mapping[int, Sequence[Note]], killed: float, stages: Mapping[str, str], seconds: float
) -> dict[str, float]:
    """Return the time of each stage: it ends when the last rank is through with it."""
    ends = [
        max(line["at"] for lines in notes.values() for line in lines if line["event"] == event)
        for event in list(stages)[:-1]
        if any(line["event"] == event for lines in notes.values() for line in lines)
    ]
    if not ends:
        return {}
    times = [killed, *ends, killed + seconds]
    lasted = (after - before for before, after in pairwise(times))
    return dict(zip(stages.values(), lasted, strict=True))


KILLS, ELASTIC_STEPS = "kills", "elastic-steps"
NEW_STEP, NEXT_STEP = "kill to the end of the next new step", "kill to the end of the next step"
NOT_ELASTIC, NOT_ELASTIC_AGAIN, ELASTIC = "not elastic", "not elastic again", "elastic"
_MEDIAN_SECONDS, _LATE_SECONDS, _RATIO = 1.0, 3.0, 1.01
_LATE = 0.95
_OWN = "hvdtrain"


def figures_of_kills(result: Result) -> Iterator[Figure]:
    """Yield the figures that have a target."""
    for case in result.cases:
        if case.name.startswith(_OWN):
            values = case.values[NEW_STEP]
            yield figure_of(f"{case.name}: {NEW_STEP}", values, "s", _MEDIAN_SECONDS)
            late = late_of(values)
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


def late_of(values: Sequence[float]) -> float:
    """Return what 95 % of the values do not exceed."""
    return sorted(values)[ceil(_LATE * len(values)) - 1]


_TIMES = ("", "median", "95 %", "least", "most")
_COSTS = ("", "went on", "time lost", "taken again", "counted twice", "left out")


def kill_tables(result: Result) -> Iterator[Table]:
    """Yield a table that compares the libraries, and one of times for each of them."""
    costs = [(case.name, *costs_of(case)) for case in result.cases]
    yield table_of(f"one of {result.ranks} processes killed: samples and time", _COSTS, costs)
    for case in result.cases:
        rows = [
            (title, *(f"{s:.3f} s" for s in (median(v), late_of(v), min(v), max(v))))
            for title, v in case.values.items()
        ]
        yield table_of(case.name, _TIMES, rows)


def costs_of(case: Case) -> tuple[str, ...]:
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
