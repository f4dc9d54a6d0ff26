"""What becomes of the state of each rank's own optimizer after an exchange of weights."""

from __future__ import annotations

from enum import Enum

__all__ = ["InnerState", "parse_inner_state"]


class InnerState(Enum):
    """What becomes of the state of each rank's own optimizer after an exchange of weights."""

    KEEP = "keep"
    AVERAGE = "average"
    RESET = "reset"


def parse_inner_state(text: str) -> InnerState:
    """Return the member that the option `state` names."""
    try:
        return InnerState(text)
    except ValueError:
        names = ", ".join(each.value for each in InnerState)
        raise ValueError(f"state must be one of {names}, got {text}") from None
