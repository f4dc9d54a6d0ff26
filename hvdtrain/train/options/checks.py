"""Checks of single option values; each raises UsageError with the label of the option."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.options.interval import Interval

# Called with the label of the option and its value.
Check = Callable[[str, Any], None]


def at_least(least: int) -> Check:
    """Return a check for integers of at least `least`."""

    def check(label: str, value: int) -> None:
        if value < least:
            raise UsageError(f"{label} must be at least {least}, got {value}")

    return check


def one_of(choices: Sequence[str]) -> Check:
    """Return a check for names from a list."""

    def check(label: str, value: str) -> None:
        if value not in choices:
            raise UsageError(f"{label} must be one of {', '.join(choices)}, got {value!r}")

    return check


def positive(label: str, value: float) -> None:
    """Require a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{label} must be a positive number, got {value}")


def not_negative(label: str, value: float) -> None:
    """Require a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{label} must be 0 or more, got {value}")


def between_0_and_1(label: str, value: float) -> None:
    """Require a number from 0 to below 1."""
    if not 0 <= value < 1:
        raise UsageError(f"{label} must be 0 or more and less than 1, got {value}")


def not_empty(label: str, value: str) -> None:
    """Require text that is not empty."""
    if not value.strip():
        raise UsageError(f"{label} must not be empty, got {value!r}")


def every(label: str, value: str) -> None:
    """Require an interval; see Interval.parse."""
    Interval.parse(value, label)
