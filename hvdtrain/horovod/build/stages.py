"""Progress of work that takes minutes: one line per stage, with its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_Detail = Callable[[str], None]


class Stages:
    """Reports stages on stdout: with a spinner on a terminal, otherwise as plain lines."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()

    @contextmanager
    def stage(self, title: str) -> Iterator[_Detail]:
        """Time a stage; yield a function that shows a short text on its progress.

        A stage that raises is reported as failed.
        """
        started = time.monotonic()
        show = self._spin if self._on_terminal else self._plain
        outcome = "failed after "
        try:
            with show(title) as detail:
                yield detail
            outcome = ""
        finally:
            seconds = time.monotonic() - started
            start = f"{title} ... " if self._on_terminal else ""
            print(f"{start}{outcome}{seconds:.0f} s", flush=True)

    @contextmanager
    def _plain(self, title: str) -> Iterator[_Detail]:
        print(f"{title} ... ", end="", flush=True)
        yield lambda text: None

    @contextmanager
    def _spin(self, title: str) -> Iterator[_Detail]:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task(title)
            yield lambda text: progress.update(task, description=f"{title} {text}")
