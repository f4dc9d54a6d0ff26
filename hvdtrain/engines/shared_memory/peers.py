"""The processes that the ranks of a node wait for, which shared memory does not show (local)."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.engines.shared_memory.processes import PeerWatch
from hvdtrain.errors import ConnectionLostError

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
        self._check_seconds, self._checked = check_seconds, time.monotonic()
        self.check_nanoseconds = int(check_seconds * 1e9)

    def check_now_and_then(self) -> None:
        """Check as `check` does, unless that was done a moment ago."""
        if time.monotonic() - self._checked > self._check_seconds:
            self.check()

    def check(self) -> None:
        """Check that the launcher and the processes of all peers are running."""
        self._checked = time.monotonic()
        self._check_launcher()
        if (number := self._watch.ended()) is not None:
            raise ConnectionLostError(
                f"a peer on this node (number {number} of {self._size}) has ended while others "
                "waited for it: look for its own message"
            )

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()
