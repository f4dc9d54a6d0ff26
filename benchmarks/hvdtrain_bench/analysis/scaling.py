"""Predicted scaling, with the measurements of this machine or with given ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvdtrain_bench.analysis.link import Link, fit_link
from hvdtrain_bench.analysis.paper import Prediction, Work, predict
from hvdtrain_bench.harness.results import Result

__all__ = [
    "RANKS",
    "Check",
    "check_predictions",
    "link_of",
    "predictions",
    "scaling_document",
    "works_of",
]

RANKS = tuple(1 << power for power in range(13))


@dataclass(frozen=True)
class Check:
    """A prediction and its measurement.

    Attributes:
        model: name of the model.
        ranks: number of ranks.
        predicted_seconds: predicted step time.
        measured_seconds: measured step time.
        efficiency: computation of a step / measured step time.
    """

    model: str
    ranks: int
    predicted_seconds: float
    measured_seconds: float
    efficiency: float

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive if it is too long."""
        return self.predicted_seconds / self.measured_seconds - 1


def link_of(profile: Result) -> Link:
    """Fit the link between the ranks of a profile."""
    points = [(int(nbytes), float(seconds)) for nbytes, seconds in profile.extra["link"]]
    return fit_link("this machine", profile.ranks, points, profile.extra["core_share"])


def works_of(profile: Result) -> list[Work]:
    """Return the work of each model, as measured on this machine."""
    return [_work(found) for found in profile.extra["works"].values()]


def check_predictions(profiles: Sequence[Result]) -> list[Check]:
    """Predict every step that was measured, with the link of the first profile.

    For the first profile this tests the model of the step, for the others that of the link as well.
    """
    link = link_of(profiles[0])
    checks = []
    for profile in profiles:
        for work, case in zip(works_of(profile), profile.cases, strict=True):
            (found,) = predict(work, [profile.ranks], link)
            measured = median(case.values["hvdtrain"])
            efficiency = work.compute_seconds / measured
            checks.append(Check(work.name, profile.ranks, found.seconds, measured, efficiency))
    return checks


def predictions(
    works: Sequence[Work], links: Sequence[Link], node: Link | None, ranks_per_node: int
) -> dict[str, dict[str, list[Prediction]]]:
    """Predict 1 to 4,096 ranks for each model and each link.

    Args:
        works: work of each model.
        links: links between nodes.
        node: link within a node, or None.
        ranks_per_node: number of ranks that share a network card.
    """
    return {
        work.name: {link.name: predict(work, RANKS, link, node, ranks_per_node) for link in links}
        for work in works
    }


def scaling_document(
    links: Sequence[Link],
    works: Sequence[Work],
    found: Mapping[str, Mapping[str, Sequence[Prediction]]],
    checks: Sequence[Check],
) -> dict[str, Any]:
    """Return the results in a form that JSON can represent.

    Args:
        links: links between ranks.
        works: work of each model.
        found: predictions by model and link.
        checks: predictions that were measured here.
    """
    return {
        "links": [asdict(link) for link in links],
        "works": [asdict(work) for work in works],
        "checks": [{**asdict(check), "error": check.error} for check in checks],
        "predictions": {
            title: {name: [asdict(p) for p in of_link] for name, of_link in of_work.items()}
            for title, of_work in found.items()
        },
    }


def _work(found: Mapping[str, Any]) -> Work:
    buckets = tuple((int(nbytes), float(ready)) for nbytes, ready in found["buckets"])
    return Work(**{**found, "buckets": buckets})
