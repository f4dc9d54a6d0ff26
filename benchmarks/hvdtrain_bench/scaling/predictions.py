"""Predicted scaling, with the measurements of this machine or with given ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from hvdtrain.errors import HvdtrainError
from hvdtrain_bench.harness.results import Result
from hvdtrain_bench.scaling.paper import (
    AVERAGE,
    Cluster,
    Link,
    PredictionInterval,
    Scheme,
    StepPrediction,
    Work,
    allreduce_seconds,
    drawn,
    fit_link,
    interval_of,
    predict,
    seconds_on,
)

RANKS = tuple(1 << power for power in range(13))
HVDTRAIN = "hvdtrain"  # the contender with the average; others have the names of their schemes
# Seeds of what varies independently.
_WORKS, _SLOWDOWNS, _NETWORKS, _NODES = range(4)
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class Steps:
    """What is known of the steps of a model."""

    alone: Sequence[Work]  # equally likely works of one rank alone
    works: Sequence[Work]  # the same of one rank among others, as many
    schemes: Sequence[Scheme] = (AVERAGE,)


@dataclass(frozen=True)
class Check:
    model: str
    scheme: str
    ranks: int
    predicted: PredictionInterval  # predicted step time in seconds
    turns: Sequence[float]  # measured step time of each turn
    efficiency: float  # computation of a step / median of these

    @property
    def title(self) -> str:
        """Title of the predictions to which it belongs."""
        return _title(self.model, self.scheme)

    @property
    def seconds(self) -> float:
        """Measured step time: the median of the turns."""
        return median(self.turns)

    @property
    def error(self) -> float:
        """Relative error of the middle of the prediction; positive if it is too long."""
        return self.predicted.middle / self.seconds - 1

    @property
    def turns_inside(self) -> int:
        """Number of turns that lie in the predicted interval."""
        return sum(map(self.predicted.contains, self.turns))


def links_of(profile: Result) -> list[Link]:
    """Fit the link between the ranks of a profile, to each repeat of the measurement."""
    share = profile.extra["core_share"]
    repeats = _points(profile)
    return [_fitted("this machine", profile.ranks, points, share) for points in repeats]


def steps_of(profile: Result) -> list[Steps]:
    """Return what a profile tells of the steps of each model.

    Computing takes longer in steps that communicate, as caches then hold what others have sent.
    By how much, every other turn of the measured steps tells, if their ranks share a node; the
    rest of them are left for checks.
    """
    cluster = Cluster(_middle_link(links_of(profile)))
    found = []
    for entry, case in zip(profile.extra["works"].values(), profile.cases, strict=True):
        buckets = tuple((int(n), float(ready)) for n, ready in entry["buckets"])
        repeats = [Work(entry["name"], buckets=buckets, **phases) for phases in entry["repeats"]]
        pairs = zip(repeats[::2], case.values[HVDTRAIN][::2], strict=True)
        slowdowns = [_slowdown(work, profile, cluster, seconds) for work, seconds in pairs]
        alone, factors = drawn(repeats, _WORKS), drawn(slowdowns, _SLOWDOWNS)
        works = [work.slowed(factors[i % len(factors)]) for i, work in enumerate(alone)]
        schemes = [Scheme(**fields) for fields in entry["schemes"]]
        found.append(Steps(alone, works, [AVERAGE, *schemes]))
    return found


def check_predictions(profiles: Sequence[Result]) -> list[Check]:
    """Predict every step that was measured, with the first profile.

    For the first profile this tests that turns are alike, for the others how steps and links
    depend on the number of ranks. The network between nodes is that of their own all-reduces,
    if the ranks of the first profile share a node.
    """
    first = profiles[0]
    checks = []
    for profile in profiles:
        factor = profile.extra["crowding"] / first.extra["crowding"]
        clusters = _clusters(first, profile, factor)
        for steps, case in zip(steps_of(first), profile.cases, strict=True):
            works = [work.slowed(factor) for work in steps.works]
            for scheme in steps.schemes:
                own = scheme.on_one_node() if profile.nodes == 1 else scheme
                (found,) = predict(works, steps.alone, [profile.ranks], clusters, own)
                turns = case.values[HVDTRAIN if scheme == AVERAGE else scheme.name]
                if profile is first and scheme == AVERAGE:
                    turns = turns[1::2] or turns
                compute = median(work.compute_seconds for work in steps.alone)
                checks.append(
                    Check(
                        steps.alone[0].name,
                        scheme.name,
                        profile.ranks,
                        found.seconds,
                        turns,
                        compute / median(turns),
                    )
                )
    return checks


def predictions(
    steps: Sequence[Steps],
    links: Sequence[Sequence[Link]],
    node: Sequence[Link],
    ranks_per_node: int,
) -> dict[str, dict[str, list[StepPrediction]]]:
    """Predict 1 to 4,096 ranks, by model with its scheme and by link (of likely properties)."""
    found: dict[str, dict[str, list[StepPrediction]]] = {}
    for model in steps:
        for scheme in model.schemes:
            title = _title(model.alone[0].name, scheme.name)
            found[title] = {
                link[0].name: predict(
                    model.works, model.alone, RANKS, _joined(link, node, ranks_per_node), scheme
                )
                for link in links
            }
    return found


def scaling_document(
    links: Sequence[Sequence[Link]],
    found: Mapping[str, Mapping[str, Sequence[StepPrediction]]],
    checks: Sequence[Check],
) -> dict[str, Any]:
    return {
        "links": [
            {
                "name": values[0].name,
                "latency_seconds": asdict(interval_of([v.latency_seconds for v in values])),
                "bytes_per_second": asdict(interval_of([v.bytes_per_second for v in values])),
                "core_share": values[0].core_share,
            }
            for values in links
        ],
        "checks": [
            {
                **asdict(check),
                "seconds": check.seconds,
                "error": check.error,
                "turns_inside": check.turns_inside,
            }
            for check in checks
        ],
        "predictions": {
            title: {name: [asdict(p) for p in of_link] for name, of_link in of_work.items()}
            for title, of_work in found.items()
        },
    }


def _title(model: str, scheme: str) -> str:
    return model if scheme == AVERAGE.name else f"{model}, {scheme}"


def _points(profile: Result) -> list[list[tuple[int, float]]]:
    """Return sizes in bytes and seconds of all-reduces, for each repeat."""
    sizes = [(int(nbytes), seconds) for nbytes, seconds in profile.extra["link"]]
    return [[(nbytes, seconds[i]) for nbytes, seconds in sizes] for i in range(len(sizes[0][1]))]


def _fitted(name: str, ranks: int, points: Sequence[tuple[int, float]], core_share: float) -> Link:
    try:
        return fit_link(name, ranks, points, core_share)
    except ValueError as error:
        raise HvdtrainError(
            f"bench scaling: no link fits the all-reduces of {ranks} ranks or nodes ({error}): "
            "repeat it on a quiet machine"
        ) from None


def _middle_link(links: Sequence[Link]) -> Link:
    latency = median(link.latency_seconds for link in links)
    bandwidth = median(link.bytes_per_second for link in links)
    return replace(links[0], latency_seconds=latency, bytes_per_second=bandwidth)


def _slowdown(work: Work, profile: Result, cluster: Cluster, seconds: float) -> float:
    """Return by which factor computing was slower in a step that has taken so many seconds."""
    if profile.nodes > 1:  # an error of a slow link would be taken for it
        return 1.0
    beyond = seconds - seconds_on(work, profile.ranks, cluster)
    return max(0.0, 1 + beyond / (work.compute_seconds + work.copy_seconds))


def _clusters(first: Result, profile: Result, factor: float) -> list[Cluster]:
    """Return what connects the ranks of a profile, by the links of the first one if possible."""
    core_share = profile.extra["core_share"]
    node = [replace(link.slowed(factor), core_share=core_share) for link in links_of(first)]
    if first.nodes > 1 or profile.nodes == 1:
        return _joined(node, [], 1)
    share = profile.ranks // profile.nodes
    within = _middle_link(node)
    networks = []
    for points in _points(profile):
        between = [(n, seconds - allreduce_seconds(share, n, within)) for n, seconds in points]
        positive = [(n, max(seconds, _LEAST_SECONDS)) for n, seconds in between]
        networks.append(_fitted("network", profile.nodes, positive, core_share))
    return _joined(networks, node, share)


def _joined(network: Sequence[Link], node: Sequence[Link], ranks_per_node: int) -> list[Cluster]:
    networks, nodes = drawn(network, _NETWORKS), drawn(node, _NODES) if node else [None]
    return [
        Cluster(networks[i % len(networks)], nodes[i % len(nodes)], ranks_per_node)
        for i in range(max(len(networks), len(nodes)))
    ]
