"""What the value of one option must be by itself; each check raises UsageError with its label."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.options.interval import Interval

__all__ = [
    "Check",
    "at_least",
    "between_0_and_1",
    "every",
    "not_empty",
    "not_negative",
    "one_of",
    "positive",
]

# Takes what to call the option, and its value.
Check = Callable[[str, Any], None]


def at_least(least: int) -> Check:
    """Return a check for whole numbers from `least` on."""

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
    """Refuse what is no finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{label} must be a positive number, got {value}")


def not_negative(label: str, value: float) -> None:
    """Refuse what is no finite number from 0 on."""
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{label} must be 0 or more, got {value}")


def between_0_and_1(label: str, value: float) -> None:
    """Refuse what is not from 0 up to, but less than, 1."""
    if not 0 <= value < 1:
        raise UsageError(f"{label} must be 0 or more and less than 1, got {value}")


def not_empty(label: str, value: str) -> None:
    """Refuse the empty text."""
    if not value.strip():
        raise UsageError(f"{label} must not be empty, got {value!r}")


def every(label: str, value: str) -> None:
    """Refuse what is no interval."""
    Interval.parse(value, label)
