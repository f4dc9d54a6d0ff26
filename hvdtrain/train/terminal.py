"""Where rank 0 prints: plain lines, or lines above a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hvdtrain.world import under_launcher

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Terminal", "on_terminal"]


class Terminal:
    """Prints lines, with a progress bar below them where there is a terminal to show it.

    Args:
        speaks: whether this rank prints at all.
        bar: whether to show a progress bar.
    """

    def __init__(self, speaks: bool, bar: bool) -> None:
        self._speaks = speaks
        self._bar: Progress | None = _new_bar() if speaks and bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, lines: Iterable[str]) -> None:
        """Print lines above the bar."""
        for line in lines if self._speaks else ():
            if self._bar is None:
                print(line, flush=True)
            else:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, title: str, steps: int) -> None:
        """Start the bar of one epoch."""
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(title, total=steps)

    def advance(self) -> None:
        """Count one step."""
        if self._bar is not None and self._bar.task_ids:
            self._bar.advance(self._bar.task_ids[-1])


def on_terminal() -> bool:
    """Tell whether what this process prints is shown on a terminal.

    Open MPI's mpirun gives its ranks terminals of their own and passes on what they print, so
    below a launcher it is the launcher's output that counts, where that can be seen.
    """
    if not sys.stdout.isatty():
        return False
    if not under_launcher(os.environ):
        return True
    try:
        shown = os.readlink(f"/proc/{os.getppid()}/fd/1")
    except OSError:
        return False
    return shown.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    class SteadyConsole(Console):
        def show_cursor(self, show: bool = True) -> bool:
            # An interrupted mpirun passes nothing on: a hidden cursor would never come back.
            return False

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=SteadyConsole(force_terminal=True),
        transient=True,
    )
