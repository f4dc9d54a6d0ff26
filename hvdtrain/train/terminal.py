"""The terminal of rank 0: its lines, and a progress bar below them."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hvdtrain import __version__
from hvdtrain.topology import format_by_rank, format_ranks
from hvdtrain.train.config_file import counted
from hvdtrain.train.metrics import Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records import MetricsRecord, RanksJoined, RanksLost, Summary
from hvdtrain.train.resume import Progress
from hvdtrain.train.setup import TrainingSetup
from hvdtrain.world import under_launcher

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import Task
    from rich.text import Text


def header_lines(options: TrainOptions, setup: TrainingSetup) -> list[str]:
    """Return the lines printed at the start of a run."""
    world, samples = setup.world, setup.step_plan.samples
    size, hosts = world.topology.size, world.topology.hosts
    library = "" if world.library == "none" else f", {world.library}"
    batch, epochs = options.samples_per_step(size), setup.step_plan.epochs
    whole = f": all {samples} training samples in one step" if batch > samples else ""
    per_rank = "" if options.global_batch_size else f" ({options.samples_per_step(1)} per rank)"
    model = setup.loop.trained[0]
    if options.framework == "keras":
        parameters, layers = model.count_params(), [one for one in model.layers if one.weights]
    else:
        parameters = sum(one.numel() for one in model.parameters())
        layers = [one for one in model.modules() if next(one.parameters(False), None) is not None]
    lines = {
        "model": f"{parameters:,} parameters in {counted(len(layers), 'layer')}",
        "engine": f"{world.engine_name}{library}",
        "ranks": f"{size} on {hosts} host{'s' * (hosts > 1)}",
        "device": _device_text(setup.devices),
        "data": f"{samples} training and {setup.test_samples} test samples",
        "batch": f"{counted(batch, 'sample')} of all ranks{per_rank}{whole}",
        "epochs": f"{epochs} ({options.epochs} divided by the ranks)" * options.divide_epochs,
        "servers": _servers_text(options, size),
        "lr": _lr_text(options, size, setup),
        "buckets": world.buckets if size > 1 and options.verbose else "",
        "exchange": exchange_text(options, hosts),
        "resume": setup.state.origin,
        "results": "none: a dry run" if options.dry_run else str(setup.state.directory),
    }
    title = f"hvdtrain {__version__}: training {options.recipe} with {setup.title}"
    return [title, *(f"  {name:<9}{text}" for name, text in lines.items() if text)]


def exchange_text(options: TrainOptions, hosts: int) -> str:
    """Describe the exchange, and what it sends if there is a network; "" for the average."""
    exchange = options.make_exchange()
    if exchange is None:
        return ""
    if hosts == 1 and exchange.on_one_node:  # which the exchange itself says when it begins
        return options.exchange
    return f"{options.exchange}. {exchange.exactness}"


def _lr_text(options: TrainOptions, size: int, setup: TrainingSetup) -> str:
    base, scaled = options.base_lr, options.scaled_lr(size)
    text = f"{scaled:.4g} = base {base:.4g} x {scaled / base:.4g} ({options.lr_scaling} scaling)"
    if base != scaled and options.warmup_epochs:
        text += f", warm-up over {counted(options.warmup_epochs, 'epoch')}"
    warmup = options.warmup_epochs if base != scaled else 0.0
    text += decay_text(options, warmup, setup.step_plan.epochs)
    own = setup.recipe.optimizer is not None
    shared = ", shared by ranks" * setup.loop.shares_optimizer
    return f"{text}, {'the optimizer of the recipe' if own else options.optimizer}{shared}"


def _servers_text(options: TrainOptions, size: int) -> str:
    """Describe the ranks of a parameter server; "" without one."""
    server = options.parameter_server
    if server is None:
        return ""
    workers = options.worker_count(size)
    return f"{format_ranks(range(workers, size))}; workers: {format_ranks(range(workers))}"


def decay_text(options: TrainOptions, warmup: float, epochs: int) -> str:
    """Describe how the learning rate decays: ", cosine from epoch 5 on"; "" if it is constant."""
    if options.schedule == "constant":
        return ""
    if warmup >= epochs:
        length = counted(warmup, "epoch")
        return f", no {options.schedule}: the warm-up ({length}) takes the whole run"
    if options.schedule == "step":
        return f", step after epochs {options.milestones}"
    return f", {options.schedule} from epoch {warmup:g} on" if warmup else f", {options.schedule}"


def _device_text(devices: Sequence[str]) -> str:
    if len(set(devices)) == 1:
        return devices[0] if len(devices) == 1 else f"{devices[0]} on every rank"
    return format_by_rank(devices)


def epoch_lines(lines: Sequence[MetricsRecord], epochs: int) -> list[str]:
    """Return one line for the values measured after the same step: training, test or both."""
    first = lines[0]
    width = len(str(epochs))
    epoch = int(first.epoch) if first.epoch == int(first.epoch) else round(first.epoch, 2)
    measured = "  ".join(f"{line.split} {values_text(line.values)}" for line in lines)
    return [
        f"epoch {epoch:>{width}}/{epochs}  {measured}  lr {first.lr:.4g}  "
        f"{first.samples_per_second:.0f} samples/s"
    ]


def lost_line(failure: RanksLost) -> str:
    step = f"step {failure.step + failure.again}"
    what = f"left after {step} (SIGUSR2)" if failure.left else f"ended after {step}"
    back = f" from step {failure.step}" if failure.again else ""
    return f"{format_ranks(failure.lost)} {what}: {_continues(failure, back)}"


def joined_line(join: RanksJoined) -> str:
    return f"{format_ranks(join.joined)} joined after step {join.step}: {_continues(join)}"


def _continues(change: RanksLost | RanksJoined, back: str = "") -> str:
    return (
        f"training continues with {counted(change.ranks, 'rank')}{back} after "
        f"{change.seconds:.2f} s, {counted(change.global_batch_size, 'sample')} of all ranks per "
        f"step, learning rate {change.scaled_lr:.4g}"
    )


def failure_tags(
    failures: Sequence[RanksLost], joins: Sequence[RanksJoined] = ()
) -> dict[str, str]:
    """Return tags for trackers: "lost_at_step_12" is "rank 1 ended, 2 ranks left"."""
    tags: dict[str, list[str]] = {}
    for one in failures:
        what = "left" if one.left else "ended"
        text = f"{format_ranks(one.lost)} {what}, {counted(one.ranks, 'rank')} left"
        tags.setdefault(f"lost_at_step_{one.step}", []).append(text)
    for join in joins:
        text = f"{format_ranks(join.joined)}, {counted(join.ranks, 'rank')} then"
        tags.setdefault(f"joined_at_step_{join.step}", []).append(text)
    return {name: "; ".join(texts) for name, texts in tags.items()}


def values_text(values: Values) -> str:
    """Return "loss 0.1234, accuracy 98.61%"; values that are not numbers are omitted."""
    return ", ".join(
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}"
        for name, value in values.items()
        if isinstance(value, (int, float))
    )


def stop_lines(rank: int, progress: Progress, directory: Path | None) -> list[str]:
    """Return the lines printed when a run is stopped early; a dry run has no directory."""
    if directory is None:
        return [f"rank {rank} was asked to stop: nothing of this dry run stays"]
    return [
        f"rank {rank} was asked to stop: {progress.text} are done and saved",
        f"to continue, give the same command --out {directory} --resume auto",
    ]


def closing_lines(summary: Summary, directory: str, files: Sequence[str]) -> list[str]:
    """Return the lines printed at the end of a run."""
    seconds = summary.seconds
    digests = set(summary.weights_sha256)
    weights = (
        f"weights sha256 {summary.weights_sha256[0][:16]} on every rank"
        if len(digests) == 1
        else f"WARNING: the ranks ended with {len(digests)} different sets of weights"
    )
    # Metrics first, unlike elsewhere, because they are what a recipe was written for.
    final = dict(sorted(summary.final.items(), key=lambda item: item[0] == "loss"))
    measured = f"test {values_text(final)} " if final else ""
    early = f", stopped by a {summary.ended}" if summary.ended.startswith("callback") else ""
    if summary.ended == "early stop" and summary.best is not None:
        best = summary.best
        when = counted(float(best["epoch"]), "epoch")
        early = f", no better than {best['name']} {best['value']:.4f} after {when}"
    epochs, steps = summary.epochs, summary.steps
    done = counted(epochs, "epoch") if epochs else counted(steps, "step")
    return [
        f"{measured}after {done}{early}",
        f"{counted(summary.samples, 'sample')} in {seconds.total:.1f} s: "
        f"{summary.samples_per_second:.0f} samples/s; computing {seconds.compute:.1f} s, "
        f"communicating {seconds.communicate:.1f} s",
        weights,
        *_server_lines(summary.parameter_server),
        f"results in {directory}: {', '.join(files)}",
    ]


def dry_run_line(seconds: float, memory: Sequence[str]) -> str:
    """Return the last line of a --dry-run: the seconds of a step, and the memory of each rank."""
    return f"all is well: {seconds * 1000:.3g} ms per step; peak memory {format_by_rank(memory)}"


def _server_lines(counts: Mapping[str, Any] | None) -> list[str]:
    if counts is None:
        return []
    shards = f" of {counts['servers']} shards" if counts["servers"] > 1 else ""
    most = max(map(int, counts["staleness"]), default=0)
    applied = counted(counts["applied"], "gradient")
    return [
        f"servers applied {applied}{shards} and dropped {counts['dropped']}; "
        f"staleness {counts['mean_staleness']:.2f} updates on average, at most {most}"
    ]


class Terminal:
    """Prints lines, with a progress bar below them if there is a terminal to show it."""

    def __init__(self, prints: bool, bar: bool, log: Path | None = None) -> None:
        """Take what to do; `log` keeps the lines, also of those who print none."""
        self._prints, self._log = prints, log
        self._bar: Bar | None = _new_bar() if prints and bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def keep(self, lines: Sequence[str]) -> None:
        """Add lines to the log alone."""
        if self._log is not None:
            with suppress(OSError), open(self._log, "a", encoding="utf-8", errors="replace") as log:
                log.writelines(f"{line}\n" for line in lines)

    def print(self, lines: Sequence[str], kept: bool = True) -> None:
        if kept:
            self.keep(lines)
        for line in lines if self._prints else ():
            if self._bar is None:
                builtins.print(line, flush=True)
            else:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def end(self, lines: Sequence[str]) -> None:
        """Remove the bar and print the last lines.

        mpirun passes on what ends with a newline: without these lines the bar would stay until the
        process ends.
        """
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.print(lines)

    def begin(self, title: str, steps: int, done: int = 0, later: int = 0) -> None:
        if self._bar is None:
            return
        fields: dict[str, Any] = {"learned": "", "slowest": "", "speed": None}
        for task in self._bar.tasks:
            fields = {**task.fields, "speed": task.speed or task.fields["speed"]}
            self._bar.remove_task(task.id)
        self._bar.add_task(title, total=steps, completed=done, **{**fields, "later": later})

    def advance(self) -> None:
        if self._bar is not None and self._bar.task_ids:
            self._bar.advance(self._bar.task_ids[-1])

    def show_training(self, line: MetricsRecord) -> None:
        text = (
            f"{line.samples_per_second:.0f} samples/s  lr {line.lr:.4g}  {values_text(line.values)}"
        )
        self._show(learned=text)

    def show_slowest(self, rank: int, share: float) -> None:
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


def _new_bar() -> Bar:
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
