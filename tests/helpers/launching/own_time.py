"""How long processes had to do something, without the time in which they got no core."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Thread:
    """What the kernel counts of a thread; `waited` begins to grow when the wait is over."""

    ran: float = 0.0
    waited: float = 0.0
    wants: bool = False

    def kept_seconds(self, before: _Thread, seconds: float) -> float:
        """Return for how much of this time, up to now, it could not run though it wanted to."""
        now = seconds - (self.ran - before.ran) if self.wants else 0.0
        return min(seconds, max(now, self.waited - before.waited))


class OwnTime:
    """Counts the time in which none of some processes was kept from running.

    Where tests share the cores, a rank that is told to end may need a second of a core for it and
    get that second in ten.
    """

    def __init__(self) -> None:
        self.seconds = self.wall_seconds = 0.0
        self._at = time.monotonic()
        self._threads: dict[str, _Thread] = {}

    def count(self, pids: Iterable[int]) -> None:
        """Count the time since the last call, in which these processes lived."""
        threads = {path: _read(Path(path)) for pid in pids for path in _paths(pid)}
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        kept = (t.kept_seconds(self._threads.get(p, t), elapsed) for p, t in threads.items())
        self.seconds += elapsed - max(kept, default=0.0)
        self.wall_seconds += elapsed
        self._threads = threads


def _paths(pid: int) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(f"/proc/{pid}/task")]
    except OSError:  # it has ended
        return []


def _read(thread: Path) -> _Thread:
    try:
        ran, waited, _ = (thread / "schedstat").read_text().split()
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):  # it has ended, or this kernel does not count
        return _Thread()
    return _Thread(int(ran) / 1e9, int(waited) / 1e9, state in "RD")
