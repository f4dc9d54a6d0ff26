"""Detection of the end of peer processes on this node.

A process holds one descriptor per peer, shared by all communicators: 128 ranks with 8
communicators would otherwise need 1,016, about as many as the usual limit allows.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping
from dataclasses import dataclass


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
