"""How long a channel waits for more operations before it takes part in a round."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hvdtrain.core.process.alarm import NEVER, NOW, Alarm, after

# Operations that no thread waits for are collected, to be run as a batch, as long as more are
# submitted within the first of these times, and then within the others. A thread that submits many
# is slower while another one works, and will probably wait for them itself.
_SOON = after(500e-6)
_GATHER_SECONDS = (1.2e-3, 1.5e-3)

# How long to wait after an exchange of reports in which no request was common to all members.
_FIRST_BACK_OFF_SECONDS = 200e-6
_LONGEST_BACK_OFF_SECONDS = 10e-3


class Arrivals:
    """The submissions to a queue, counted, and waits for more; used with the lock of the queue."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._alarm = Alarm()  # for the channel's thread; not set if another one drives
        self._count = 0
        self._count_when_set = 0
        self._seen = 0  # number of submissions before the last round
        self._backing_off = False
        self._back_off_seconds = _FIRST_BACK_OFF_SECONDS
        self._hurry = False  # a thread waits, or will not submit more

    def note(self) -> None:
        """Count a submission."""
        self._count += 1
        if self._backing_off:
            self._changed.notify_all()

    def expect(self) -> None:
        """Let the channel's thread begin a round soon, unless another thread does."""
        self._count_when_set = self._count
        self._alarm.set(NOW if self._hurry else _SOON)

    def interrupt(self) -> None:
        """Let the channel's thread look at the queue now."""
        self._alarm.set(NOW)
        self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the alarm goes off, without the lock (the channel's thread)."""
        self._alarm.wait()

    def release(self) -> None:
        """Release the alarm, after the end of the channel's thread."""
        self._alarm.close()

    def note_round(self) -> None:
        """Note that a round begins, with all submissions so far."""
        self._seen, self._hurry = self._count, False
        self._alarm.set(NEVER)

    def note_run(self) -> None:
        """Begin with short waits again, because operations could be run."""
        self._back_off_seconds = _FIRST_BACK_OFF_SECONDS

    def hurry(self) -> None:
        """Let the next round begin at once."""
        self._hurry = True
        self.interrupt()

    def gather(self, closed: Callable[[], bool]) -> None:
        """Wait as long as more was submitted since the alarm was set, unless there is a hurry."""
        before = self._count_when_set
        for seconds in _GATHER_SECONDS:
            if self._count == before:
                break
            before = self._count
            if self._changed.wait_for(lambda: self._hurry or closed(), seconds):
                break
        self._hurry = False

    def back_off(self, closed: Callable[[], bool]) -> None:
        """Wait for a submission on this rank, or on another rank in the meantime."""
        self._backing_off = True
        arrived = self._changed.wait_for(
            lambda: closed() or self._count > self._seen, self._back_off_seconds
        )
        self._backing_off = False
        longer = min(2 * self._back_off_seconds, _LONGEST_BACK_OFF_SECONDS)
        self._back_off_seconds = _FIRST_BACK_OFF_SECONDS if arrived else longer
