"""The watch on ranks that end while the others go on."""

from __future__ import annotations

import threading

from hvdtrain.engines.communicator import Failures
from hvdtrain.errors import RanksLostError

_PERIOD_SECONDS = 0.1


class FailureWatch:
    """Lets all ranks notice one that has ended, also if this rank waits for none."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_PERIOD_SECONDS):
            try:
                self._failures.check()
            except RanksLostError:
                self._failures.revoke()  # which ends all calls that wait for others
                return
