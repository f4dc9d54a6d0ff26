"""Checks of the numbers that exchanges are given."""

from __future__ import annotations

import math

__all__ = ["check_momentum", "check_positive"]


def check_positive(name: str, number: float) -> None:
    """Check that an argument is a positive number.

    Args:
        name: name of the argument, for the message.
        number: its value.

    Raises:
        ValueError: it is not.
    """
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a positive number, got {number}")


def check_momentum(momentum: float) -> None:
    """Check the momentum of an exchange.

    Args:
        momentum: momentum.

    Raises:
        ValueError: it is not in [0, 1).
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
