"""A background thread for work that waits for a network or a disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]

_MOST_JOBS = 10_000


class BackgroundWorker:
    """Runs jobs in order on a thread of its own; only close() blocks.

    A job that fails does not prevent the next from running. The thread does not prevent the process
    from exiting.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(_MOST_JOBS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"hvdtrain-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job, which runs when those before it have run."""
        self._jobs.put_nowait(job)

    def take_error(self) -> Exception | None:
        """Return the newest error since the last call, or None."""
        error, self._error = self._error, None
        return error

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the jobs and end the thread; return whether all have run in that time."""
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
