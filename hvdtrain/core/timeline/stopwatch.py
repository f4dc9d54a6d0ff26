"""A stopwatch for wall-clock time."""

from __future__ import annotations

import time

from hvdtrain.core.timeline.times import Records


class Stopwatch:
    """A sum of wall-clock time.

    Attributes:
        seconds: sum so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.intervals: Records[tuple[float, float]] | None = None
        self.since: float | None = None

    def running(self) -> _Lap:
        """Return a context manager that adds the time of a `with` block."""
        return _Lap(self)


class _Lap:
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._start = self._watch.since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter()
        self._watch.since = None
        self._watch.seconds += end - self._start
        if self._watch.intervals is not None:
            self._watch.intervals.append((self._start, end))
