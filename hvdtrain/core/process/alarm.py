"""An alarm for which one thread waits, and which others set without waking it."""

from __future__ import annotations

import ctypes
import os
import threading
import time

# A struct itimerspec: the interval and the first time, each in seconds and nanoseconds.
_Times = ctypes.c_long * 4


def after(seconds: float) -> ctypes.Array[ctypes.c_long]:
    """Return the time for `Alarm.set` at which it goes off, from then on."""
    whole = int(seconds)
    return _Times(0, 0, whole, round((seconds - whole) * 1e9))


NOW = after(1e-9)
NEVER = after(0.0)

# Calls that take less than a microsecond and do not release the GIL.
_libc = ctypes.PyDLL(None)
_SETTIME = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Times), ctypes.c_void_p)
_libc.timerfd_settime.argtypes = _SETTIME


class Alarm:
    """A timer of the system: to set it costs one system call, and wakes no thread before its time.

    A condition variable would wake the waiting thread for each change of its time. If the process
    gets no more files, every time but NEVER is at once.
    """

    def __init__(self) -> None:
        self._descriptor: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        self._event = threading.Event() if self._descriptor < 0 else None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Release the timer, for which no thread waits any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def set(self, times: ctypes.Array[ctypes.c_long]) -> None:
        """Let it go off at this time only, instead of the one set before; nothing once closed.

        Args:
            times: `after(seconds)`, NOW or NEVER.
        """
        if self._event is None:
            _libc.timerfd_settime(self._descriptor, 0, times, None)
        elif times is NEVER:
            self._event.clear()
        else:
            self._event.set()

    def wait(self) -> None:
        """Block until it goes off, or return at once if it has since it was set."""
        if self._event is None:
            os.read(self._descriptor, 8)
        else:
            self._event.wait()
            self._event.clear()
