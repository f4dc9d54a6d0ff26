"""A clock that adds up how long something took."""

from __future__ import annotations

import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up wall-clock time; `seconds` is the sum so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def running(self) -> _Lap:
        """Count the time that a `with` block takes."""
        return _Lap(self)


class _Lap:
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._watch.seconds += time.perf_counter() - self._start
