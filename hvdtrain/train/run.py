"""The epochs of one run, and the books about them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from hvdtrain.core.context import Context
from hvdtrain.core.objects import allgather_object
from hvdtrain.train.course import Course
from hvdtrain.train.digest import weights_digest
from hvdtrain.train.frameworks.protocol import Loop
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.progress import Progress, save_progress
from hvdtrain.train.report import closing_lines, epoch_line
from hvdtrain.train.results import (
    METRICS,
    SUMMARY,
    Metrics,
    Score,
    Seconds,
    Summary,
    append_metrics,
    write_summary,
)
from hvdtrain.train.start import Start
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
    """

    options: TrainOptions
    world: Context
    course: Course
    test_samples: int
    loop: Loop
    start: Start
    terminal: Terminal

    def run(self) -> Summary:
        """Train the epochs that are left and write the results (collective)."""
        clock = _Clock(self.world, self.start.progress)
        progress, final, checkpoint = self.start.progress, None, ""
        for epoch in range(progress.epoch, self.options.epochs):
            self.terminal.begin(f"epoch {epoch + 1}/{self.options.epochs}", self._steps)
            train, test = self._epoch(epoch, progress.step + self._steps)
            final = Score(test.loss, test.accuracy)
            progress = clock.read(epoch + 1, train.step, progress.samples + self.course.samples)
            checkpoint = self._keep(train, test, progress)
            self.terminal.say([epoch_line(train, test, self.options.epochs)])
        final = final or self.loop.evaluate()
        progress = clock.read(progress.epoch, progress.step, progress.samples)
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

    def _epoch(self, epoch: int, steps_done: int) -> tuple[Metrics, Metrics]:
        """Train and evaluate one epoch, counted from 0; return what both splits gave."""
        began = time.perf_counter()
        learning = self.loop.train_epoch(epoch, self.terminal.advance)
        trained = time.perf_counter()
        result = self.loop.evaluate()
        ended = time.perf_counter()
        train = Metrics(
            epoch=epoch + 1,
            step=steps_done,
            split="train",
            loss=learning.loss,
            accuracy=learning.accuracy,
            lr=self.loop.lr,
            samples_per_second=self.course.samples / (trained - began),
        )
        return train, replace(
            train,
            split="test",
            loss=result.loss,
            accuracy=result.accuracy,
            samples_per_second=self.test_samples / (ended - trained),
        )

    def _keep(self, train: Metrics, test: Metrics, progress: Progress) -> str:
        """Write an epoch's metrics, then its checkpoint, on rank 0; return the latter's name.

        In this order, a run that is killed in between has at most metrics too many, and those
        are dropped when it goes on.
        """
        if not self._is_root:
            return ""
        append_metrics(self.start.directory, [train, test])
        return save_progress(self.start.directory, progress, self.options, self.loop.state).name

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

    def read(self, epoch: int, step: int, samples: int) -> Progress:
        """Return the progress of now."""
        return Progress(
            epoch=epoch,
            step=step,
            samples=samples,
            total_seconds=time.perf_counter() - self._total_from,
            communicate_seconds=self._blocked.seconds - self._communicate_from,
        )
