"""Checks of the numbers that exchanges are given."""

from __future__ import annotations

import math
import operator


def check_count(name: str, number: int, least: int = 1) -> None:
    """Check that an argument is a whole number that is not too small."""
    try:
        operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {number!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")


def check_positive(name: str, number: float) -> None:
    """Check that an argument is a positive number."""
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive number, got {number}")


def check_momentum(momentum: float) -> None:
    """Check the momentum of an exchange."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
