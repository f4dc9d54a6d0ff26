"""The terminal of rank 0: plain lines, or lines above a progress bar."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hvdtrain.train.messages import values_text
from hvdtrain.train.records import MetricsRecord
from hvdtrain.world import under_launcher

if TYPE_CHECKING:
    from rich.progress import Progress, Task
    from rich.text import Text


class Terminal:
    """Prints lines, with a progress bar below them if there is a terminal to show it."""

    def __init__(self, prints: bool, bar: bool) -> None:
        self._prints = prints
        self._bar: Progress | None = _new_bar() if prints and bar else None

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

    def print(self, lines: Iterable[str]) -> None:
        """Print lines above the bar."""
        for line in lines if self._prints else ():
            if self._bar is None:
                builtins.print(line, flush=True)
            else:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def end(self, lines: Iterable[str]) -> None:
        """Remove the bar and print the last lines.

        mpirun passes on what ends with a newline: without these lines the bar would stay until the
        process ends.
        """
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.print(lines)

    def begin(self, title: str, steps: int, done: int = 0, later: int = 0) -> None:
        """Start the bar of an epoch."""
        if self._bar is None:
            return
        fields: dict[str, Any] = {"learned": "", "slowest": "", "speed": None}
        for task in self._bar.tasks:
            fields = {**task.fields, "speed": task.speed or task.fields["speed"]}
            self._bar.remove_task(task.id)
        self._bar.add_task(title, total=steps, completed=done, **{**fields, "later": later})

    def advance(self) -> None:
        """Count one step."""
        if self._bar is not None and self._bar.task_ids:
            self._bar.advance(self._bar.task_ids[-1])

    def show_training(self, line: MetricsRecord) -> None:
        """Show the values of a line of steps.jsonl."""
        text = (
            f"{line.samples_per_second:.0f} samples/s  lr {line.lr:.4g}  {values_text(line.values)}"
        )
        self._show(learned=text)

    def show_slowest(self, rank: int, share: float) -> None:
        """Show the rank that the others wait for."""
        self._show(slowest=f"slowest: rank {rank}, computing {share:.0%}")

    def _show(self, **fields: Any) -> None:
        if self._bar is not None and self._bar.task_ids:
            self._bar.update(self._bar.task_ids[-1], **fields)


def on_terminal() -> bool:
    """Return whether the output of this process appears on a terminal.

    Open MPI's mpirun gives its ranks terminals of their own and forwards what they print. Under a
    launcher the launcher's own output therefore decides, if it can be inspected.
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
            # An interrupted mpirun forwards nothing: a hidden cursor would stay hidden.
            return False

    class LeftColumn(ProgressColumn):
        """The time that all epochs will still take."""

        def render(self, task: Task) -> Text:
            speed = task.speed or task.fields["speed"]  # the epoch before's, at first
            if not speed:
                return Text("-:--:-- left")
            seconds = ((task.remaining or 0) + task.fields["later"]) / speed
            return Text(f"{timedelta(seconds=round(seconds))} left")

    class TwoLines(Progress):
        """Shows values on a line of their own below the bar, so that the bar fits any terminal."""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            for task in self.tasks:
                yield Text(task.fields["learned"], no_wrap=True, overflow="ellipsis")
            # mpirun keeps a line back until its newline comes: the values are not the last one.
            yield Text()

    return TwoLines(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        LeftColumn(),
        TextColumn("{task.fields[slowest]}", markup=False, table_column=Column(no_wrap=False)),
        console=SteadyConsole(force_terminal=True),
        transient=True,
    )
