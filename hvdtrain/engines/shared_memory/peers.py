"""The processes that the ranks of a node wait for, which shared memory does not show (local)."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdtrain.errors import ConnectionLostError


@dataclass
class _Watched:
    """A descriptor that becomes readable when a process ends, and its number of users."""

    descriptor: int
    users: int = 0


_lock = threading.Lock()
_watched: dict[int, _Watched] = {}


class PeerWatch:
    """Watches processes until it is closed."""

    def __init__(self, peers: Mapping[int, int]) -> None:
        self._peers: dict[int, int] = {}
        self._processes: list[int] = []
        self._poll = select.poll()
        try:
            for process, number in peers.items():
                descriptor = _acquire(process)
                self._processes.append(process)
                self._peers[descriptor] = number
                self._poll.register(descriptor, select.POLLIN)
        except BaseException:
            self.close()
            raise

    def ended(self) -> int | None:
        """Return a rank whose process has ended, or None."""
        return next((self._peers[descriptor] for descriptor, _ in self._poll.poll(0)), None)

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        for descriptor in self._peers:
            self._poll.unregister(descriptor)
        for process in self._processes:
            _release(process)
        self._peers, self._processes = {}, []


def _acquire(process: int) -> int:
    with _lock:
        if process not in _watched:
            _watched[process] = _Watched(os.pidfd_open(process))
        _watched[process].users += 1
        return _watched[process].descriptor


def _release(process: int) -> None:
    with _lock:
        watched = _watched[process]
        watched.users -= 1
        if watched.users == 0:
            os.close(watched.descriptor)
            del _watched[process]


# How often to handle signals, and to check peers.
CHECK_SECONDS = 1.0


class Peers:
    """The launcher, and the processes of the other ranks of a node."""

    def __init__(
        self,
        watch: PeerWatch,
        size: int,
        check_launcher: Callable[[], object],
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._watch, self._size, self._check_launcher = watch, size, check_launcher
        self._check_seconds, self.due = check_seconds, time.monotonic() + check_seconds
        self.check_nanoseconds = int(check_seconds * 1e9)

    def check_now_and_then(self) -> None:
        """Check as `check` does, unless that was done a moment ago."""
        if time.monotonic() > self.due:
            self.check()

    def check(self) -> None:
        """Check that the launcher and the processes of all peers are running."""
        self.due = time.monotonic() + self._check_seconds
        self._check_launcher()
        if (number := self._watch.ended()) is not None:
            raise ConnectionLostError(
                f"a peer on this node (number {number} of {self._size}) has ended while others "
                "waited for it: look for its own message"
            )

    def close(self) -> None:
        self._watch.close()
