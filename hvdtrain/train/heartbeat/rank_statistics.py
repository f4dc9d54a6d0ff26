"""Where the time of each rank went: the lines of ranks.jsonl."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.train.heartbeat.heartbeat import RESOURCE_FIELDS, HeartbeatReport

_EVERY_SECONDS = 2.0


class RankStatistics:
    """Adds up heartbeat reports and makes a line of ranks.jsonl every few seconds (rank 0 only).

    Between two exchanges, the rank that was blocked least waited for nobody: so long was data being
    moved, on all ranks. The time that another rank was blocked beyond that, it waited.

    Args:
        sent_bytes_per_step: bytes that each rank sends per step.
    """

    def __init__(self, sent_bytes_per_step: int) -> None:
        self._sent = sent_bytes_per_step
        self.slowest = (0, 1.0)
        self._reset()

    def _reset(self) -> None:
        self._seconds, self._steps = 0.0, 0
        self._moving = 0.0
        self._blocked: npt.NDArray[np.float64] | float = 0.0
        self._last: HeartbeatReport | None = None

    def add(self, report: HeartbeatReport) -> None:
        """Add the report of an exchange."""
        self._seconds += report.seconds
        self._steps += report.steps
        self._blocked = self._blocked + report.blocked
        self._moving += float(report.blocked.min())
        self._last = report
        compute = np.maximum(self._seconds - self._blocked, 0.0)
        rank = int(compute.argmax())
        self.slowest = (rank, float(compute[rank]) / self._seconds)

    def line(self, step: int, seconds: float, at_once: bool = False) -> dict[str, Any] | None:
        """Return a line of ranks.jsonl and start the next; None if too little time has passed."""
        if self._last is None or (self._seconds < _EVERY_SECONDS and not at_once):
            return None
        blocked = np.asarray(self._blocked)
        line = {
            "step": step,
            "seconds": seconds,
            "span": self._seconds,
            "compute": np.maximum(self._seconds - blocked, 0.0).tolist(),
            "waiting": (blocked - self._moving).tolist(),
            "moving": [self._moving] * len(blocked),
            "sent_bytes": [self._sent * self._steps] * len(blocked),
        }
        for number, name in enumerate(RESOURCE_FIELDS):
            column = self._last.resources[:, number].tolist()
            line[name] = [None if math.isnan(value) else value for value in column]
        self._reset()
        return line
