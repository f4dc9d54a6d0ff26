"""Comparison of evaluations: which value decides, and which of two is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hvdtrain.errors import UsageError
from hvdtrain.train.metrics.totals import RatedMetric, Values


def improved(
    value: float, best: float | None, name: str, metrics: Mapping[str, RatedMetric]
) -> bool:
    """Return whether a value is better than the best one before it.

    Lower is better for the loss, and for metrics whose higher_is_better is False. A value that is
    not finite is never better.
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value > best if _higher_is_better(name, metrics) else value < best


def require_known(name: str, metrics: Mapping[str, RatedMetric]) -> None:
    """Check, before the first evaluation, that it will have the value that decides."""
    known = [one for one in ("loss", *metrics) if _higher_is_better(one, metrics) is not None]
    if name not in known:
        raise _unknown(name, known)


def require_number(values: Values, name: str, metrics: Mapping[str, RatedMetric]) -> float:
    """Return the value that decides which evaluation is best."""
    numbers = {
        known: float(value)
        for known, value in values.items()
        if isinstance(value, (int, float)) and _higher_is_better(known, metrics) is not None
    }
    if name not in numbers:
        raise _unknown(name, list(numbers))
    return numbers[name]


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    return UsageError(
        f"--best {name}: an evaluation has nothing of that name which can be better or worse: "
        f"choose from {', '.join(known)}"
    )


def _higher_is_better(name: str, metrics: Mapping[str, RatedMetric]) -> bool | None:
    return False if name == "loss" else metrics[name].higher_is_better
