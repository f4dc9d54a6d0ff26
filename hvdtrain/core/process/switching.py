"""Lets the threads that move bytes go on soon beside a program that is busy in Python."""

from __future__ import annotations

import math
import sys

__all__ = ["LONGEST_SWITCH_SECONDS", "restore_switch_interval", "shorten_switch_interval"]

# A thread that comes back from the kernel waits so long for a busy one, several times in each
# operation; Python's own 5 ms make an all-reduce of 16 MiB ten times as slow. Where no thread
# waits for another this costs nothing.
LONGEST_SWITCH_SECONDS = 500e-6


def shorten_switch_interval() -> float:
    """Have threads change places soon; return how long they took before (local)."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, LONGEST_SWITCH_SECONDS))
    return before


def restore_switch_interval(before: float) -> None:
    """Undo shorten_switch_interval(), unless the program has chosen a value meanwhile (local)."""
    if math.isclose(sys.getswitchinterval(), LONGEST_SWITCH_SECONDS, rel_tol=0.01):
        sys.setswitchinterval(before)
