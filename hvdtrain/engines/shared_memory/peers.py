"""The processes that the ranks of a node wait for, which shared memory does not show (local)."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdtrain.engines.shared_memory.processes import PeerWatch
from hvdtrain.errors import PeerFailureError

__all__ = ["CHECK_NANOSECONDS", "Peers"]

# After this time in the kernel, signals are handled and peers are checked.
CHECK_NANOSECONDS = 1_000_000_000

# How often to check between short calls.
_CHECK_SECONDS = 1.0


class Peers:
    """The launcher, and the processes of the other ranks of a node.

    Args:
        watch: watch on the processes.
        size: number of ranks of the node.
        check_launcher: function that detects that the launcher has ended.
    """

    def __init__(self, watch: PeerWatch, size: int, check_launcher: Callable[[], object]) -> None:
        self._watch, self._size, self._check_launcher = watch, size, check_launcher
        self._checked = time.monotonic()

    def check_now_and_then(self) -> None:
        """Check as `check` does, about once a second."""
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self.check()

    def check(self) -> None:
        """Check that the launcher and the processes of all peers are running.

        Raises:
            PeerFailureError: the process of a rank has ended.
        """
        self._checked = time.monotonic()
        self._check_launcher()
        if (number := self._watch.ended()) is not None:
            raise PeerFailureError(
                f"a peer on this node (number {number} of {self._size}) has ended while others "
                "waited for it: look for its own message"
            )

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()
