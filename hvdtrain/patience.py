"""Waiting for others without burning a core."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_patiently"]

_SPIN_SECONDS = 100e-6
_SHORTEST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 5e-3


def wait_patiently(test: Callable[[], bool]) -> None:
    """Call `test` until it is true.

    It spins for 100 us, because peers are nearly always there by then. After that it sleeps
    for a fiftieth of the time waited so far, 5 ms at most: waiting inside MPI would burn a core.
    """
    started = time.perf_counter()
    while not test():
        waited = time.perf_counter() - started
        if waited > _SPIN_SECONDS:
            time.sleep(min(max(waited / 50, _SHORTEST_SLEEP_SECONDS), _LONGEST_SLEEP_SECONDS))
