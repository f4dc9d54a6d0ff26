"""Waiting without keeping a core busy."""

from __future__ import annotations

import time
from collections.abc import Callable

_SPIN_SECONDS = 100e-6
_SHORTEST_SLEEP_SECONDS = 50e-6
_LONGEST_SLEEP_SECONDS = 5e-3


def poll_until(test: Callable[[], bool]) -> None:
    """Call `test` until it returns true.

    It spins for 100 us, within which peers nearly always arrive. After that it sleeps between
    calls for a fiftieth of the time waited so far, at most 5 ms; waiting inside MPI would keep a
    core busy.
    """
    started = time.perf_counter()
    while not test():
        waited = time.perf_counter() - started
        if waited > _SPIN_SECONDS:
            time.sleep(min(max(waited / 50, _SHORTEST_SLEEP_SECONDS), _LONGEST_SLEEP_SECONDS))
