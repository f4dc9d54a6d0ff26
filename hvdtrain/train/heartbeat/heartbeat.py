"""The heartbeat: a small regular exchange of stop requests, timers and times between the ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.context import Context, newcomer_waits
from hvdtrain.train.heartbeat.resources import ResourceMonitor, ResourceUsage
from hvdtrain.train.heartbeat.signals import StopSignals
from hvdtrain.types import ReduceOp

# Interval of the exchange; a scheduler leaves at least some seconds after its signal.
_EVERY_SECONDS = 0.5

RESOURCE_FIELDS = tuple(field.name for field in fields(ResourceUsage))
# Columns of a row: steps to the next exchange, stop requested, leave requested, another rank waits
# to join, seconds waited for communication.
_STEPS, _STOP, _LEAVE, _JOIN, _BLOCKED = _COLUMNS = range(5)


@dataclass(frozen=True)
class HeartbeatReport:
    """The result of one exchange.

    Attributes:
        blocked: seconds in which each rank waited for communication, [N].
    """

    seconds: float
    steps: int
    blocked: npt.NDArray[np.float64]
    resources: npt.NDArray[np.float64]


class Heartbeat:
    """Exchanges a few numbers between ranks after the same steps, about twice a second.

    Args:
        timers: seconds of rank 0's clock after which something is due, by name.
    """

    def __init__(self, world: Context, signals: StopSignals, timers: Mapping[str, float]) -> None:
        self.stop_rank: int | None = None
        self.leaving: tuple[int, ...] = ()
        self.joins = False
        self.due: set[str] = set()
        self.report: HeartbeatReport | None = None
        self._world, self._signals = world, signals
        self._timers = dict(timers)
        self._since = time.perf_counter()
        self._reset = dict.fromkeys(timers, self._since)
        self._steps = self._left = 1
        self._blocked = world.blocked.seconds
        self._monitor = ResourceMonitor()

    @collective
    def after_step(self) -> bool:
        """Count a step; return whether the ranks have exchanged (the same on all)."""
        self._left -= 1
        if self._left:
            return False
        self._exchange()
        return True

    @property
    def interrupts(self) -> bool:
        """Whether training is to be interrupted after this step, the same on all ranks."""
        return self.stop_rank is not None or bool(self.leaving) or self.joins

    def done(self, timer: str, seconds: float | None = None) -> None:
        """Restart a timer."""
        self.due.discard(timer)
        if timer in self._timers:
            if seconds is not None:
                self._timers[timer] = seconds
            self._reset[timer] = time.perf_counter()

    def _exchange(self) -> None:
        topology = self._world.topology
        seconds = max(time.perf_counter() - self._since, 1e-6)
        rows = np.zeros((topology.size, len(_COLUMNS) + len(self._timers) + len(RESOURCE_FIELDS)))
        rows[topology.rank] = self._row(seconds)
        operations.allreduce(
            self._world.world, [Buffer.from_array(rows)], [rows.shape], ReduceOp.SUM, "heartbeat"
        ).run()
        first = len(_COLUMNS) + len(self._timers)
        self.report = HeartbeatReport(seconds, self._steps, rows[:, _BLOCKED], rows[:, first:])
        stopping = np.flatnonzero(rows[:, _STOP])
        self.stop_rank = int(stopping[0]) if len(stopping) else None
        self.leaving = tuple(np.flatnonzero(rows[:, _LEAVE]).tolist())
        self.joins = bool(rows[:, _JOIN].any())
        self.due |= {
            name
            for name, flag in zip(self._timers, rows[0, len(_COLUMNS) : first], strict=True)
            if flag
        }
        self._steps = self._left = int(rows[:, _STEPS].min())
        self._since = time.perf_counter()
        self._blocked = self._world.blocked.seconds

    def _row(self, seconds: float) -> list[float]:
        """Return the numbers of this rank."""
        now = time.perf_counter()
        steps = max(1, int(self._steps * _EVERY_SECONDS / seconds))
        flags = [float(now - self._reset[name] >= after) for name, after in self._timers.items()]
        usage = self._monitor.read()
        values = [getattr(usage, name) for name in RESOURCE_FIELDS]
        resources = [float("nan") if value is None else float(value) for value in values]
        blocked = self._world.blocked.seconds - self._blocked
        asked, leaves = float(self._signals.asked), float(self._signals.leaves)
        joins = float(newcomer_waits())
        return [steps, asked, leaves, joins, blocked, *flags, *resources]
