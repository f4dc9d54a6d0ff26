"""The times of steps, and when their buckets are filled."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


class StepTimes:
    """Times of the steps since the last clear(), apart from the first step of all.

    Attributes:
        seconds: time of each step, from the end of the step before.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._ready: list[list[float]] = []
        self._reduced: list[list[float]] = []
        self._filled: list[float] = []
        self._reducing: list[float] = []
        self._ended: float | None = None

    def clear(self) -> None:
        """Forget all steps that have ended."""
        self.seconds, self._ready, self._reduced = [], [], []
        self._filled, self._reducing = [], []

    def note_bucket(self, filled: float, seconds: float) -> None:
        """Note when the next bucket of the step was filled, and how long its reduction took."""
        self._filled.append(filled)
        self._reducing.append(seconds)

    def end_step(self, when: float) -> None:
        """Note that the step has ended at a time."""
        if self._ended is not None:
            start = self._ended
            self.seconds.append(when - start)
            self._ready.append([filled - start for filled in self._filled])
            self._reduced.append(self._reducing)
        self._ended, self._filled, self._reducing = when, [], []

    def ready_seconds(self) -> Sequence[float]:
        """Return the median time of each bucket, after the end of the step before."""
        return [median(times) for times in zip(*self._ready, strict=True)]

    def reduced_seconds(self) -> Sequence[float]:
        """Return the median time of the reduction of each bucket."""
        return [median(times) for times in zip(*self._reduced, strict=True)]

    def median_seconds(self) -> float:
        """Return the median time of a step."""
        return median(self.seconds)
