"""How long a run has taken, over all its starts."""

from __future__ import annotations

import time
from dataclasses import replace

from hvdtrain.core.context import Context
from hvdtrain.train.progress import Progress

__all__ = ["Clock"]


class Clock:
    """Measures how long training takes, and how long it stands still for communication."""

    def __init__(self, world: Context, before: Progress) -> None:
        self._blocked = world.blocked
        self._total_from = time.perf_counter() - before.total_seconds
        self._communicate_from = world.blocked.seconds - before.communicate_seconds

    @property
    def total_seconds(self) -> float:
        """Since the very first start, pauses between starts left out."""
        return time.perf_counter() - self._total_from

    def read(self, progress: Progress) -> Progress:
        """Return the progress with the times of now."""
        communicate = self._blocked.seconds - self._communicate_from
        return replace(progress, total_seconds=self.total_seconds, communicate_seconds=communicate)
