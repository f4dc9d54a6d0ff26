"""Python's thread switch interval, shortened so that communication threads need not wait."""

from __future__ import annotations

import math
import sys

# A thread that returns from the kernel waits this long for a busy one, several times in each
# operation; Python's default of 5 ms makes an all-reduce of 16 MiB ten times as slow. If no thread
# waits for another one, a short interval costs nothing.
LONGEST_SWITCH_SECONDS = 500e-6


def shorten_switch_interval() -> float:
    """Shorten the thread switch interval; return the previous one in seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, LONGEST_SWITCH_SECONDS))
    return before


def restore_switch_interval(before: float) -> None:
    """Restore the thread switch interval, unless the program has changed it since."""
    if math.isclose(sys.getswitchinterval(), LONGEST_SWITCH_SECONDS, rel_tol=0.01):
        sys.setswitchinterval(before)
