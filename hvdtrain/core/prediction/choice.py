"""The choice of an exchange for each gradient (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.prediction.costs import Measured, Prediction, predict, run_seconds

# A step must become shorter by more than this: predictions are not more exact.
_LEAST_GAIN = 0.05


def predictions(measured: Measured, plan: BucketPlan) -> list[Prediction]:
    """Return the average, each other method where it is shorter, and all of them together."""
    count = len(measured.methods)
    allowed = [[0], *([0, number] for number in range(1, count))]
    if count > 2:
        allowed.append(list(range(count)))
    found = [predict(measured, plan, _shortest(measured, plan, numbers)) for numbers in allowed]
    return [each for at, each in enumerate(found) if each.choice not in _choices(found[:at])]


def best(found: Sequence[Prediction]) -> Prediction:
    """Return the prediction of the shortest step, or the first one if no other gains 5 %."""
    shortest = min(found, key=lambda each: each.seconds)
    return shortest if shortest.seconds < (1 - _LEAST_GAIN) * found[0].seconds else found[0]


def _choices(found: Sequence[Prediction]) -> list[tuple[int, ...]]:
    return [each.choice for each in found]


def _shortest(measured: Measured, plan: BucketPlan, allowed: Sequence[int]) -> list[int]:
    """Return the method of each gradient with which each bucket takes the least time."""
    choice = [0] * len(plan.specs)
    for bucket in plan.buckets:
        chosen = _shortest_of_bucket(measured, bucket.parameters, allowed)
        for index, method in zip(bucket.parameters, chosen, strict=True):
            choice[index] = method
    return choice


def _shortest_of_bucket(
    measured: Measured, indices: Sequence[int], allowed: Sequence[int]
) -> list[int]:
    """Return the method of each gradient of a bucket, by dynamic programming over its runs."""
    starts = {n: run_seconds(measured, measured.methods[n], ()) for n in allowed}
    # Time and methods of the gradients so far, by the method of the last one.
    paths: dict[int, tuple[float, list[int]]] = {}
    for index in indices:
        least = min(paths.values(), default=(0.0, []))
        following = {}
        for number in allowed:
            own = run_seconds(measured, measured.methods[number], [index])
            begun = (least[0] + own, least[1])
            if number in paths:
                seconds, methods = paths[number]
                begun = min(begun, (seconds + own - starts[number], methods))
            following[number] = (begun[0], [*begun[1], number])
        paths = following
    return min(paths.values(), default=(0.0, []))[1]
