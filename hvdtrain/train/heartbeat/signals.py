"""Signals that ask a rank to stop early."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from hvdtrain.world import OPEN_MPI, promised_world

__all__ = ["StopSignals", "stop_signals"]


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
