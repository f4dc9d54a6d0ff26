"""The epochs of one run, and the books about them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from hvdtrain.core.context import Context
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.data.sharding import steps_per_epoch
from hvdtrain.train.course import Course
from hvdtrain.train.digest import weights_digest
from hvdtrain.train.frameworks.protocol import Loop
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.progress import Progress, save_progress
from hvdtrain.train.report import closing_lines, epoch_line, stop_lines
from hvdtrain.train.requeue import leave_marker
from hvdtrain.train.results import (
    METRICS,
    SUMMARY,
    Metrics,
    Score,
    Seconds,
    Summary,
    Sums,
    append_metrics,
    write_summary,
)
from hvdtrain.train.start import Start
from hvdtrain.train.stopping import Stop
from hvdtrain.train.terminal import Terminal

__all__ = ["Run"]


@dataclass(frozen=True)
class Run:
    """A training run that is ready to begin.

    Attributes:
        options: what was asked for.
        world: the ranks.
        course: its steps.
        test_samples: how many there are.
        loop: the model, equal on all ranks.
        start: where it begins.
        terminal: where rank 0 prints.
        stop: knows whether to end before.
    """

    options: TrainOptions
    world: Context
    course: Course
    test_samples: int
    loop: Loop
    start: Start
    terminal: Terminal
    stop: Stop

    def run(self) -> Summary | None:
        """Train the epochs that are left and write the results (collective).

        Returns:
            None where it was stopped before its end.
        """
        clock = _Clock(self.world, self.start.progress)
        progress, final, checkpoint = self.start.progress, None, ""
        for epoch in range(progress.epoch, self.options.epochs):
            if self.stop.rank is not None:
                self._leave(progress)
                return None
            self.terminal.begin(f"epoch {epoch + 1}/{self.options.epochs}", self._steps)
            began = time.perf_counter()
            learned = self.loop.train_epoch(epoch, progress.part.samples, self._after_step)
            speed = learned.samples / (time.perf_counter() - began)
            part = progress.part + learned
            step = progress.step + steps_per_epoch(learned.samples, self.course.global_batch_size)
            samples = progress.samples + learned.samples
            if part.samples < self.course.samples:
                progress = clock.read(epoch, step, samples, part)
                self._keep([], progress)
                self._leave(progress)
                return None
            train = self._metrics(epoch, step, "train", part.score, speed)
            test = self._evaluated(train)
            final = Score(test.loss, test.accuracy)
            progress = clock.read(epoch + 1, step, samples, Sums())
            checkpoint = self._keep([train, test], progress)
            self.terminal.say([epoch_line(train, test, self.options.epochs)])
        final = final or self.loop.evaluate()
        progress = clock.read(progress.epoch, progress.step, progress.samples, Sums())
        summary = self._summary(progress, final)
        if self._is_root:
            write_summary(self.start.directory, summary)
        files = [METRICS, SUMMARY, *filter(None, [checkpoint])]
        self.terminal.say(closing_lines(summary, str(self.start.directory), files))
        return summary

    @property
    def _steps(self) -> int:
        return self.course.steps_per_epoch

    @property
    def _is_root(self) -> bool:
        return self.world.topology.rank == 0

    def _after_step(self) -> bool:
        self.terminal.advance()
        return self.stop.after_step()

    def _metrics(self, epoch: int, step: int, split: str, score: Score, speed: float) -> Metrics:
        """Return the line of a split after an epoch, counted from 0."""
        loss, accuracy = score.loss, score.accuracy
        return Metrics(epoch + 1, step, split, loss, accuracy, self.loop.lr, speed)

    def _evaluated(self, train: Metrics) -> Metrics:
        """Evaluate; return the line that goes with that of the training samples (collective)."""
        began = time.perf_counter()
        score = self.loop.evaluate()
        speed = self.test_samples / (time.perf_counter() - began)
        return self._metrics(train.epoch - 1, train.step, "test", score, speed)

    def _keep(self, lines: list[Metrics], progress: Progress) -> str:
        """Write metrics, then a checkpoint, on rank 0; return the latter's name.

        In this order, a run that is killed in between has at most metrics too many, and those
        are dropped when it goes on.
        """
        if not self._is_root:
            return ""
        if lines:
            append_metrics(self.start.directory, lines)
        return save_progress(self.start.directory, progress, self.options, self.loop.state).name

    def _leave(self, progress: Progress) -> None:
        """Say, after the checkpoint, that this is not the end (collective)."""
        directory = self.start.directory
        lines = stop_lines(self.stop.rank or 0, progress, str(directory))
        call_on_root(partial(leave_marker, directory, lines[0]))
        self.terminal.say(lines)

    def _summary(self, progress: Progress, final: Score) -> Summary:
        topology = self.world.topology
        total, communicate = progress.total_seconds, progress.communicate_seconds
        return Summary(
            world_size=topology.size,
            hosts=topology.hosts,
            host_names=list(dict.fromkeys(topology.hostnames)),
            engine=self.world.engine_name,
            framework=self.options.framework,
            global_batch_size=self.options.samples_per_step(topology.size),
            base_lr=self.options.base_lr,
            scaled_lr=self.options.scaled_lr(topology.size),
            epochs=progress.epoch,
            final=final,
            samples=progress.samples,
            samples_per_second=progress.samples / total,
            seconds=Seconds(total, total - communicate, communicate),
            weights_sha256=allgather_object(weights_digest(self.loop.state.weights()), "weights"),
        )


class _Clock:
    """Measures how long training takes, and how long it stands still for communication."""

    def __init__(self, world: Context, before: Progress) -> None:
        self._blocked = world.blocked
        self._total_from = time.perf_counter() - before.total_seconds
        self._communicate_from = world.blocked.seconds - before.communicate_seconds

    def read(self, epoch: int, step: int, samples: int, part: Sums) -> Progress:
        """Return the progress of now."""
        return Progress(
            epoch=epoch,
            step=step,
            samples=samples,
            total_seconds=time.perf_counter() - self._total_from,
            communicate_seconds=self._blocked.seconds - self._communicate_from,
            part=part,
        )
