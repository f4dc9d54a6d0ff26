"""Which of two evaluations is the better one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.metrics.totals import Values

__all__ = ["improved", "require_known", "require_number"]


def improved(value: float, best: float | None, name: str, metrics: Mapping[str, Any]) -> bool:
    """Return whether a value is better than the best before it; the first one is.

    Less is better for the loss, and for metrics whose higher_is_better is False; what is not
    finite is never better.
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value > best if _higher_is_better(name, metrics) else value < best


def require_known(name: str, metrics: Mapping[str, Any]) -> None:
    """Check before the first evaluation that it will have what decides.

    Raises:
        UsageError: there is none of this name, or nothing of it is better or worse.
    """
    known = [one for one in ("loss", *metrics) if _higher_is_better(one, metrics) is not None]
    if name not in known:
        raise _unknown(name, known)


def require_number(values: Values, name: str, metrics: Mapping[str, Any]) -> float:
    """Return the value that decides.

    Raises:
        UsageError: there is none of this name, or it is no number.
    """
    numbers = [
        known
        for known, value in values.items()
        if isinstance(value, (int, float)) and _higher_is_better(known, metrics) is not None
    ]
    if name not in numbers:
        raise _unknown(name, numbers)
    return float(values[name])


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    return UsageError(
        f"--best {name}: an evaluation has nothing of that name which can be better or worse: "
        f"choose from {', '.join(known)}"
    )


def _higher_is_better(name: str, metrics: Mapping[str, Any]) -> bool | None:
    if name == "loss":
        return False
    higher: bool | None = metrics[name].higher_is_better
    return higher
