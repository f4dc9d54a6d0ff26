"""What ranks tell each other while they train: who is to stop, what is due, how they fare."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core import operations
from hvdtrain.core.context import Context
from hvdtrain.train.heartbeat.resources import ResourceMonitor, ResourceUsage
from hvdtrain.train.heartbeat.signals import StopSignals
from hvdtrain.types import ReduceOp

__all__ = ["RESOURCE_FIELDS", "Heartbeat", "HeartbeatReport"]

# How often ranks exchange this: a scheduler gives at least some seconds.
_EVERY_SECONDS = 0.5

RESOURCE_FIELDS = tuple(field.name for field in fields(ResourceUsage))
# Of a row: steps to the next exchange, whether asked to stop, seconds stood still.
_STEPS, _ASKED, _BLOCKED = range(3)


@dataclass(frozen=True)
class HeartbeatReport:
    """What one exchange told.

    Attributes:
        seconds: since the one before, on this rank.
        steps: so many were taken.
        blocked: for each rank the seconds in which it stood still for communication, [N].
        figures: for each rank what SystemFigures holds, in its order, [N, ...].
    """

    seconds: float
    steps: int
    blocked: npt.NDArray[np.float64]
    figures: npt.NDArray[np.float64]


class Heartbeat:
    """Has ranks exchange a few numbers after the same steps, about twice a second.

    Args:
        world: the ranks.
        signals: those to this rank.
        timers: by name, after how many seconds of rank 0's clock something is due.

    Attributes:
        stop_rank: the first rank that was asked to stop; None as long as no rank knows of one.
        due: the timers that have run out, on all ranks the same, until done() is called.
        beat: what the last exchange told; None before the first.
    """

    def __init__(self, world: Context, signals: StopSignals, timers: Mapping[str, float]) -> None:
        self.stop_rank: int | None = None
        self.due: set[str] = set()
        self.report: HeartbeatReport | None = None
        self._world, self._signals = world, signals
        self._timers = dict(timers)
        self._since = time.perf_counter()
        self._reset = dict.fromkeys(timers, self._since)
        self._steps = self._left = 1
        self._blocked = world.blocked.seconds
        self._system = ResourceMonitor()

    def after_step(self) -> bool:
        """Count a step; return whether the ranks have exchanged (collective, the same on all)."""
        self._left -= 1
        if self._left:
            return False
        self._exchange()
        return True

    def done(self, timer: str) -> None:
        """Begin a timer anew."""
        self.due.discard(timer)
        if timer in self._timers:
            self._reset[timer] = time.perf_counter()

    def _exchange(self) -> None:
        topology = self._world.topology
        seconds = max(time.perf_counter() - self._since, 1e-6)
        rows = np.zeros((topology.size, 3 + len(self._timers) + len(RESOURCE_FIELDS)))
        rows[topology.rank] = self._row(seconds)
        operations.allreduce(
            self._world.world, [Buffer.from_array(rows)], [rows.shape], ReduceOp.SUM, "heartbeat"
        ).run()
        first = 3 + len(self._timers)
        self.report = HeartbeatReport(seconds, self._steps, rows[:, _BLOCKED], rows[:, first:])
        asked = np.flatnonzero(rows[:, _ASKED])
        self.stop_rank = int(asked[0]) if len(asked) else None
        self.due |= {
            name for name, flag in zip(self._timers, rows[0, 3:first], strict=True) if flag
        }
        self._steps = self._left = int(rows[:, _STEPS].min())
        self._since = time.perf_counter()
        self._blocked = self._world.blocked.seconds

    def _row(self, seconds: float) -> list[float]:
        """Return what this rank tells."""
        now = time.perf_counter()
        steps = max(1, int(self._steps * _EVERY_SECONDS / seconds))
        flags = [float(now - self._reset[name] >= after) for name, after in self._timers.items()]
        figures = self._system.read()
        told = [getattr(figures, name) for name in RESOURCE_FIELDS]
        shown = [float("nan") if figure is None else float(figure) for figure in told]
        blocked = self._world.blocked.seconds - self._blocked
        return [steps, float(self._signals.asked), blocked, *flags, *shown]
