"""Stopping early on request: a signal to any rank has all of them stop after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core import operations
from hvdtrain.core.context import Context
from hvdtrain.types import ReduceOp
from hvdtrain.world import OPEN_MPI, promised_world

__all__ = ["Stop", "StopSignals", "stop_signals"]

# How often ranks ask each other: a scheduler gives at least some seconds.
_EVERY_SECONDS = 0.5


def stop_signals(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals that ask a rank to stop: SIGUSR1, and SIGTERM where there is time.

    Open MPI's mpirun leaves its ranks a second, or a quarter of one, between SIGTERM and SIGKILL.
    """
    promised = promised_world(environ)
    if promised is not None and promised.launcher == OPEN_MPI:
        return (signal.SIGUSR1,)
    return (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """Notes signals to this process while a `with` block runs; does nothing in other threads.

    Attributes:
        asked: whether one has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals(os.environ):
                self._before[number] = signal.signal(number, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in list(self._before):
            self._give_back(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGTERM:
            self._give_back(number)  # a second one means at once

    def _give_back(self, number: int) -> None:
        try:
            before = self._before.pop(number)
        except KeyError:  # a signal in the middle of __exit__ has given it back
            return
        signal.signal(number, signal.SIG_DFL if before is None else before)


class Stop:
    """Finds out after which step all ranks stop.

    Args:
        world: the ranks.
        signals: those to this rank.

    Attributes:
        rank: the first rank that was asked; None as long as no rank knows of one.
    """

    def __init__(self, world: Context, signals: StopSignals) -> None:
        self.rank: int | None = None
        self._world, self._signals = world, signals
        self._steps = self._left = 1
        self._since = time.perf_counter()

    def after_step(self) -> bool:
        """Count a step; return whether to take another one (collective, the same on all ranks)."""
        self._left -= 1
        if self._left == 0:
            self._ask()
        return self.rank is None

    def _ask(self) -> None:
        """Exchange who was asked, and after how many steps to exchange it again."""
        seconds = max(time.perf_counter() - self._since, 1e-6)
        steps = max(1, int(self._steps * _EVERY_SECONDS / seconds))
        topology = self._world.topology
        first = topology.rank if self._signals.asked else topology.size
        answer = np.array([steps, first], np.int64)
        buffer = Buffer.from_array(answer)
        operations.allreduce(
            self._world.world, [buffer], [answer.shape], ReduceOp.MIN, "whether to stop"
        ).run()
        self._steps = self._left = int(answer[0])
        self.rank = int(answer[1]) if answer[1] < topology.size else None
        self._since = time.perf_counter()
