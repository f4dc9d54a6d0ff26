"""A clock for a rank's stall watch that a test holds, so that no rank that is late is a stall."""

import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hvdtrain.core import stall
from hvdtrain.core.agreement import operation, queue
from hvdtrain.core.gradients import step


class HeldClock:
    """The time of this rank's stall watch, and of what it watches; at first it stands still.

    Make it before init().
    """

    def __init__(self, *more: ModuleType) -> None:
        self.seconds_per_look = 0.0
        # What has passed until it was last held or moved, and since when it goes.
        self._state: tuple[float, float | None] = (0.0, None)
        self._looks = 0
        instead: Any = SimpleNamespace(**{**vars(time), "perf_counter": self._now})
        for module in (operation, queue, step, stall, *more):
            module.time = instead  # type: ignore[attr-defined]
        look, clock = stall.StallWatch._look, self

        def counted(self: stall.StallWatch) -> bool:
            goes_on = look(self)
            clock._looks += 1
            if clock.seconds_per_look:
                clock.move(clock.seconds_per_look)
            return goes_on

        stall.StallWatch._look = counted  # type: ignore[method-assign]

    def go(self) -> None:
        self._state = (self._now(), time.perf_counter())

    def hold(self) -> None:
        self._state = (self._now(), None)

    def move(self, seconds: float) -> None:
        passed, since = self._state
        self._state = (passed + seconds, since)

    def await_look(self) -> None:
        """Wait until the watch has looked once more, at what there is now."""
        wanted = self._looks + 2  # a look may be under way
        while self._looks < wanted:
            time.sleep(0.01)

    def _now(self) -> float:
        passed, since = self._state
        return passed if since is None else passed + time.perf_counter() - since


def await_files(*names: str) -> None:
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)
