"""Losses of exchanges, compared with those of the plain average seed by seed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

# Points of a training: steps, seconds of training, loss of the test samples.
Curve = Sequence[Sequence[float]]


@dataclass(frozen=True)
class LossSummary:
    """The losses that one exchange reaches on one task."""

    name: str
    mean: float  # mean of the last losses over the seeds
    low: float  # lowest last loss of a seed
    high: float  # highest last loss of a seed
    difference: float  # mean difference from the base with the same seed; 0 for the base
    # "within the seeds" if the mean lies between the lowest and the highest loss of the base,
    # otherwise "lower" or "higher".
    verdict: str
    equal_time: float  # mean loss after the time that the fastest exchange needs for all steps
    seconds: float  # median time of all steps


def compare_losses(
    curves: Mapping[str, Sequence[Curve]], base: str
) -> tuple[float, list[LossSummary]]:
    """Return the seconds that the fastest exchange needs, and a summary for each exchange.

    All have curves with the same steps and seeds.
    """
    last = {name: [curve[-1][2] for curve in of_seeds] for name, of_seeds in curves.items()}
    seconds = {name: median(curve[-1][1] for curve in of) for name, of in curves.items()}
    shortest = min(seconds.values())
    found = []
    for name, losses in last.items():
        pairs = zip(losses, last[base], strict=True)
        summary = LossSummary(
            name=name,
            mean=mean(losses),
            low=min(losses),
            high=max(losses),
            difference=mean(own - other for own, other in pairs),
            verdict="" if name == base else _verdict(mean(losses), last[base]),
            equal_time=mean(loss_after(curve, shortest) for curve in curves[name]),
            seconds=seconds[name],
        )
        found.append(summary)
    return shortest, found


def loss_after(curve: Curve, seconds: float) -> float:
    """Return the loss at a time, on the line between two points; after the last it remains."""
    for (_, before, first), (_, after, second) in pairwise(curve):
        if seconds <= after:
            return first + (second - first) * (seconds - before) / (after - before)
    return curve[-1][2]


def _verdict(value: float, of_base: Sequence[float]) -> str:
    if min(of_base) <= value <= max(of_base):
        return "within the seeds"
    return "lower" if value < min(of_base) else "higher"
