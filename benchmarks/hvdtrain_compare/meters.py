"""What a process has used: memory, and bytes sent through sockets."""

from __future__ import annotations

import re
from pathlib import Path

_LOOPBACK = re.compile(r"^\s*lo:\s*(.*)$", re.MULTILINE)
# In /proc/net/dev eight numbers of what was received come first.
_SENT = 8


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
        self._started = sent_bytes()

    def stop(self) -> None:
        """Pause."""
        if self._started >= 0:
            self._total += sent_bytes() - self._started
        self._started = -1

    def per_step(self, steps: int) -> float | None:
        """Return the bytes of each of so many steps; None without any."""
        return self._total / steps if steps else None


def sent_bytes() -> int:
    """Return the bytes that were sent through the loopback interface; 0 if there is none."""
    try:
        found = _LOOPBACK.search(Path("/proc/net/dev").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(found[1].split()[_SENT]) if found else 0
