"""A thread that does what has to wait for a network or a disk, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["BackgroundWorker"]

Job = Callable[[], None]

_MOST_JOBS = 10_000


class BackgroundWorker:
    """Runs jobs one after the other on a thread of its own; none of its methods waits but close().

    A job that fails does not keep the next from being tried. The thread does not keep the process
    from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(_MOST_JOBS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"hvdtrain-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have a job run when those before it have.

        Raises:
            queue.Full: more are waiting than can be kept; this one is lost.
        """
        self._jobs.put_nowait(job)

    def take_error(self) -> Exception | None:
        """Return what went wrong since the last call, if anything: the newest error."""
        error, self._error = self._error, None
        return error

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the jobs, and end the thread. Return whether all have run in that time."""
        try:
            self._jobs.put(None, timeout=timeout_seconds)
        except queue.Full:
            return False
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._error = error
