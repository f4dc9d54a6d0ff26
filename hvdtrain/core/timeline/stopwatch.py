"""A clock that adds up how long something took."""

from __future__ import annotations

import time

from hvdtrain.core.timeline.times import Records

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up wall-clock time.

    Attributes:
        seconds: the sum so far.
        intervals: where to keep from when to when it ran, if anywhere.
        since: when what is being counted began (time.perf_counter); None when nothing is.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.intervals: Records[tuple[float, float]] | None = None
        self.since: float | None = None

    def running(self) -> _Lap:
        """Count the time that a `with` block takes."""
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
