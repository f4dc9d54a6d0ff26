"""Signals that ask the ranks to stop early, or one of them to leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self

from hvdtrain.world import OPEN_MPI, promised_world

# What signal.signal() takes and returns.
_Handler = Callable[[int, FrameType | None], Any] | int | None


def stop_signals(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals that ask a rank to stop: SIGUSR1, and SIGTERM if there is time.

    Open MPI's mpirun leaves its ranks a second, or a quarter of one, between SIGTERM and SIGKILL.
    """
    promised = promised_world(environ)
    if promised is not None and promised.launcher == OPEN_MPI:
        return (signal.SIGUSR1,)
    return (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """Records signals to this process during a `with` block; does nothing in other threads."""

    def __init__(self) -> None:
        self.asked = self.leaves = False
        self._before: dict[int, _Handler] = {}

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
            self._restore(number)

    def accept_leave(self) -> None:
        """Take SIGUSR2 for a request that this rank leaves."""
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGUSR2, self._note_leave)
            self._before.setdefault(signal.SIGUSR2, before)

    def _note_leave(self, number: int, frame: FrameType | None) -> None:
        self.leaves = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGTERM:
            self._restore(number)  # a second one ends the process at once

    def _restore(self, number: int) -> None:
        try:
            before = self._before.pop(number)
        except KeyError:  # restored by a signal in the middle of __exit__
            return
        signal.signal(number, signal.SIG_DFL if before is None else before)
