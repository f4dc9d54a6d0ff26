"""What a process has used: time, memory, and bytes sent through sockets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.sampling import Indices
from hvdtrain_bench.compare.protocol import ContenderTask, ProcessPlace, RankResult, Weights
from hvdtrain_bench.harness.network import sent_bytes


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had; getrusage() includes its parent's."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


class StepMeter:
    """Times steps, keeps the weights after some of them, and counts what all processes send.

    The kernel counts bytes for the loopback interface as a whole: what other programs send is in
    it. Memory that processes share is not.
    """

    def __init__(self, check_after: int) -> None:
        self.seconds: list[float] = []
        self._epochs: list[float] = []
        self._trained: list[Indices] = []
        self._checked: Weights = {}
        self._sent = self._sent_before = 0
        self._check_after, self._started, self._first = check_after, 0.0, 0

    def begin(self) -> None:
        """Begin the first step of an epoch."""
        self._started = time.perf_counter()

    def end_step(self, weights: Callable[[], Weights]) -> None:
        """End a step, and begin the next."""
        self.seconds.append(time.perf_counter() - self._started)
        if len(self.seconds) == 1:  # it opens connections
            self._sent_before = sent_bytes(loopback=True)
        if len(self.seconds) == self._check_after:
            self.stop()
            self._checked = weights()
            self._sent_before = sent_bytes(loopback=True)
        self._started = time.perf_counter()

    def end_epoch(self, shares: Sequence[Indices]) -> None:
        """End an epoch, in which this process had these samples in each step."""
        self._epochs.append(sum(self.seconds[self._first :]))
        self._first = len(self.seconds)
        self._trained.append(np.concatenate(shares))

    def stop(self) -> None:
        """Add the bytes since the last time."""
        self._sent += sent_bytes(loopback=True) - self._sent_before

    def result(
        self, task: ContenderTask, place: ProcessPlace, final: Callable[[], Weights], **others: Any
    ) -> RankResult:
        """Return what was measured, with the final weights, and what else is known."""
        keeps, steps = task.keeps_weights and place.rank == 0, len(self.seconds) - 1
        return RankResult(
            step_seconds=self.seconds,
            epoch_seconds=self._epochs,
            trained=self._trained,
            checked_after=self._check_after,
            peak_memory_bytes=peak_memory_bytes(),
            socket_bytes_per_step=self._sent / steps if steps else None,
            checked_weights=self._checked if keeps else {},
            final_weights=final() if keeps else {},
            **others,
        )
