"""Where rank 0 prints: plain lines, or lines above a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hvdtrain.train.messages import values_text
from hvdtrain.train.records.results import MetricsRecord
from hvdtrain.world import under_launcher

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.text import Text

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

    def begin(self, title: str, steps: int, done: int = 0, later: int = 0) -> None:
        """Start the bar of one epoch.

        Args:
            title: of the epoch.
            steps: in it.
            done: of these, before.
            later: steps in the epochs after it.
        """
        if self._bar is None:
            return
        told: dict[str, Any] = {"learned": "", "slowest": "", "speed": None}
        for task in self._bar.tasks:
            told = {**task.fields, "speed": task.speed or task.fields["speed"]}
            self._bar.remove_task(task.id)
        self._bar.add_task(title, total=steps, completed=done, **{**told, "later": later})

    def advance(self) -> None:
        """Count one step."""
        if self._bar is not None and self._bar.task_ids:
            self._bar.advance(self._bar.task_ids[-1])

    def learned(self, line: MetricsRecord) -> None:
        """Show how training goes."""
        text = (
            f"{line.samples_per_second:.0f} samples/s  lr {line.lr:.4g}  {values_text(line.values)}"
        )
        self._show(learned=text)

    def slowest(self, rank: int, share: float) -> None:
        """Show which rank the others wait for, and which part of the time it computes."""
        self._show(slowest=f"slowest: rank {rank}, computing {share:.0%}")

    def _show(self, **fields: Any) -> None:
        if self._bar is not None and self._bar.task_ids:
            self._bar.update(self._bar.task_ids[-1], **fields)


def on_terminal() -> bool:
    """Return whether what this process prints is shown on a terminal.

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
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class SteadyConsole(Console):
        def show_cursor(self, show: bool = True) -> bool:
            # An interrupted mpirun passes nothing on: a hidden cursor would never come back.
            return False

    class LeftColumn(ProgressColumn):
        """How long all epochs will still take."""

        def render(self, task: Task) -> Text:
            speed = task.speed or task.fields["speed"]  # that of the epoch before, at first
            if not speed:
                return Text("-:--:-- left")
            seconds = ((task.remaining or 0) + task.fields["later"]) / speed
            return Text(f"{timedelta(seconds=round(seconds))} left")

    class TwoLines(Progress):
        """Has figures of its own width below the bar, which so stays whole on any terminal."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            for task in self.tasks:
                yield Text(task.fields["learned"], no_wrap=True, overflow="ellipsis")

    return TwoLines(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        LeftColumn(),
        TextColumn("{task.fields[slowest]}", markup=False, table_column=Column(no_wrap=False)),
        console=SteadyConsole(force_terminal=True),
        transient=True,
    )
