"""The log of a run on rank 0: metrics, checkpoints, summary and trackers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.errors import TrainingError
from hvdtrain.files import replacing
from hvdtrain.train.checkpoints import Saver, best_file, load_checkpoint
from hvdtrain.train.loop.heartbeat import HeartbeatReport, RankStatistics
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records import (
    CONFIG,
    MARKER,
    METRICS,
    RANKS,
    STEPS,
    SUMMARY,
    MetricsRecord,
    Summary,
    append_lines,
    json_text,
    usage_errors,
)
from hvdtrain.train.resume import Progress, checkpoint_content, world_settings
from hvdtrain.train.setup import TrainingSetup
from hvdtrain.train.tracking.tracker import Status, metric_values, rank_values
from hvdtrain.train.tracking.trackers import Trackers


class RunLog:
    """Writes the files of a run and passes the values on to trackers (rank 0 only)."""

    def __init__(self, options: TrainOptions, setup: TrainingSetup, trackers: Trackers) -> None:
        self._directory, self._options = setup.state.directory, options
        self._setup, self._trackers = setup, trackers
        size, sent = setup.world.topology.size, setup.loop.gradient_bytes
        self.statistics = RankStatistics(sent if size > 1 else 0)
        self._incomplete: set[str] = set()
        self._saver = Saver(self._directory, options.keep_checkpoints)

    def note(self, report: HeartbeatReport | None, step: int, seconds: float) -> None:
        """Add the report of a heartbeat, and write a line of ranks.jsonl if one is due."""
        if report is not None:
            self.statistics.add(report)
        line = self.statistics.line(step, seconds)
        if line is not None:
            self._append(RANKS, [line], sync=False)
            self._trackers.log(rank_values(line), step, seconds)

    def write(self, lines: Sequence[MetricsRecord]) -> None:
        """Write lines of metrics.jsonl."""
        self._append(METRICS, [line.line() for line in lines])
        self._track(lines)

    def write_step(self, line: MetricsRecord) -> None:
        """Write a line of steps.jsonl."""
        self._append(STEPS, [line.line()], sync=False)
        self._track([line])

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]], sync: bool = True) -> None:
        """Append lines to a file; if it fails, warn once and continue: training is worth more."""
        try:
            append_lines(self._directory, name, lines, sync)
        except OSError as error:
            if name not in self._incomplete:
                self._incomplete.add(name)
                problem = f"{self._directory / name} cannot be written ({error.strerror})"
                print(
                    f"hvdtrain: {problem}: lines are missing; training continues", file=sys.stderr
                )

    def _track(self, lines: Sequence[MetricsRecord]) -> None:
        for line in lines:
            self._trackers.log(metric_values(line.line()), line.step, line.seconds)

    def save(self, progress: Progress, exchange: dict[str, Any] | None, best: bool) -> None:
        """Start writing a checkpoint, and report what went wrong with earlier ones."""
        about, state = self._about(progress, exchange), self._setup.loop.state
        self._saver.save(progress.epoch, progress.done, state, about, best)
        for problem in self._saver.problems():
            print(f"hvdtrain: {problem}; training continues", file=sys.stderr, flush=True)

    def content(self, progress: Progress, exchange: dict[str, Any] | None) -> dict[str, Any]:
        """Return what save() would write; it lasts until the next snapshot of the state."""
        self._saver.wait()  # for a checkpoint that is being written: snapshots share memory
        about = self._about(progress, exchange)
        read = self._setup.loop.state.snapshot()
        return {**about, **read()}

    def best_weights(self, step: int) -> dict[str, Any]:
        """Read what load_weights() takes from the best checkpoint, made after a step."""
        self._saver.finish()
        places, resumed = [self._directory], self._options.resume
        if resumed not in ("auto", "never"):
            places.append(Path(resumed).parent)  # of another run, which this one continues
        for path in filter(None, map(best_file, places)):
            content = load_checkpoint(path, self._setup.loop.state.tensor_library)
            if content["step"] == step:
                return {name: content[name] for name in ("model", "extras") if name in content}
        raise TrainingError(
            f"the checkpoint of the best evaluation, after step {step}, is not in "
            f"{' or '.join(map(str, places))}: its weights cannot be restored"
        )

    def _about(self, progress: Progress, exchange: dict[str, Any] | None) -> dict[str, Any]:
        setup = self._setup
        about = checkpoint_content(progress, self._options, setup.step_plan.samples)
        about["world"] = world_settings(setup.world, setup.loop, setup.threads)
        if exchange is not None:
            about["exchange"] = exchange
        return about

    def close(self, status: Status = "failed") -> None:
        """Wait for the checkpoint, and end the trackers unless they have been ended."""
        with self._saver:
            self._trackers.end(status)

    def stopped(self, text: str) -> None:
        """Write the `requeue` file of a run that is to be resumed, after its checkpoint."""
        self._saver.finish()
        with usage_errors(self._directory):
            (self._directory / MARKER).write_text(f"{text}\n", encoding="utf-8")
        self._trackers.end("stopped")

    def ended(self, summary: Summary) -> list[str]:
        """Write the summary, and return the names of the main result files."""
        newest = self._saver.finish()
        line = self.statistics.line(summary.steps, summary.seconds.total, last=True)
        if line is not None:
            self._append(RANKS, [line], sync=False)
        with usage_errors(self._directory), replacing(self._directory / SUMMARY) as file:
            file.write((json_text(asdict(summary), indent=2) + "\n").encode())
        best = best_file(self._directory)
        for path in (self._directory / CONFIG, self._directory / SUMMARY, best or newest):
            if path is not None:
                self._trackers.artifact(path)
        self._trackers.end("finished")
        return [METRICS, SUMMARY, *([newest.name] if newest is not None else [])]
