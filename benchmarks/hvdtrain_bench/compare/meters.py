"""What a process has used: time, memory, and bytes sent through sockets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.sampling import Indices
from hvdtrain_bench.compare.protocol import Place, RankResult, Task, Weights
from hvdtrain_bench.harness.network import sent_bytes


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had; getrusage() includes its parent's."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


class SocketMeter:
    """Counts the bytes that all processes send to each other on this host while it runs.

    The kernel counts them for the loopback interface as a whole: what other programs send is in it.
    Memory that processes share is not.
    """

    def __init__(self) -> None:
        self._total, self._started = 0, -1

    def start(self) -> None:
        """Begin to count, or continue."""
        self._started = sent_bytes(loopback=True)

    def stop(self) -> None:
        """Pause."""
        if self._started >= 0:
            self._total += sent_bytes(loopback=True) - self._started
        self._started = -1

    def per_step(self, steps: int) -> float | None:
        """Return the bytes of each of so many steps; None without any."""
        return self._total / steps if steps else None


class StepMeter:
    """Times steps, and keeps the weights after some of them."""

    def __init__(self, check_after: int) -> None:
        self.seconds: list[float] = []
        self._epochs: list[float] = []
        self._trained: list[Indices] = []
        self._checked: Weights = {}
        self._sockets = SocketMeter()
        self._check_after, self._started, self._first = check_after, 0.0, 0

    def begin(self) -> None:
        """Begin the first step of an epoch."""
        self._started = time.perf_counter()

    def end_step(self, weights: Callable[[], Weights]) -> None:
        """End a step, and begin the next."""
        self.seconds.append(time.perf_counter() - self._started)
        if len(self.seconds) == 1:
            self._sockets.start()  # the first step opens connections
        if len(self.seconds) == self._check_after:
            self._sockets.stop()
            self._checked = weights()
            self._sockets.start()
        self._started = time.perf_counter()

    def end_epoch(self, shares: Sequence[Indices]) -> None:
        """End an epoch, in which this process had these samples in each step."""
        self._epochs.append(sum(self.seconds[self._first :]))
        self._first = len(self.seconds)
        self._trained.append(np.concatenate(shares))

    def stop(self) -> None:
        """Count no more bytes."""
        self._sockets.stop()

    def result(
        self, task: Task, place: Place, final: Callable[[], Weights], **others: Any
    ) -> RankResult:
        """Return what was measured, with the final weights, and what else is known."""
        keeps = task.keeps_weights and place.rank == 0
        return RankResult(
            step_seconds=self.seconds,
            epoch_seconds=self._epochs,
            trained=self._trained,
            checked_after=self._check_after,
            peak_memory_bytes=peak_memory_bytes(),
            socket_bytes_per_step=self._sockets.per_step(len(self.seconds) - 1),
            checked_weights=self._checked if keeps else {},
            final_weights=final() if keeps else {},
            **others,
        )
