"""What a killed process cost, from the notes of all processes of its job. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from hvdtrain_bench.harness.notes import BEGIN, END, WORLD, Note


class UnfinishedJobError(Exception):
    """The job did not continue after the kill, or did not reach its end."""


@dataclass(frozen=True)
class Failure:
    """The cost of one killed process.

    Attributes:
        seconds: time from the kill to the end of the first step on samples that were not used
            before it, on the last rank.
        next_seconds: time from the kill to the end of the first step after it, new or not.
        stages: time of each stage in between, if the library's notes tell it.
        again: samples of steps that were complete, and taken again.
        twice: samples that have changed the final weights more than once, counted once more each.
        lost: samples that have never changed the final weights.
    """

    seconds: float
    next_seconds: float
    stages: dict[str, float]
    step_seconds: float
    again: int
    twice: int
    lost: int


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

    Args:
        stages: title of the stage that ends with an event, by event, in order; the last one ends
            with the next step.
        starts: samples that were used before the world of each number, where notes lack it.
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
