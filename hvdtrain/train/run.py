"""One training run: its epochs, and what is done after which step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hvdtrain.collective import collective
from hvdtrain.core.membership.world import Context
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.errors import HostsUpdatedInterrupt, RanksLostError, TooFewRanksError, TrainingError
from hvdtrain.topology import format_ranks
from hvdtrain.train.loop.gather import on_this_rank
from hvdtrain.train.loop.heartbeat import Heartbeat
from hvdtrain.train.loop.protocol import TrainingLoop
from hvdtrain.train.loop.replica_check import replica_difference, require_finite
from hvdtrain.train.loop.snapshots import EVALUATE, SAVE, SNAPSHOT, Snapshots, Triggers
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import Totals, Values, improved, require_number
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.options.config_file import counted
from hvdtrain.train.options.declare import Interval
from hvdtrain.train.parameter_server.protocol import Pushes
from hvdtrain.train.records import MetricsRecord, RanksJoined, RanksLost, Seconds, Summary
from hvdtrain.train.resume import BestEvaluation, Progress, RunClock
from hvdtrain.train.run_log import RunLog
from hvdtrain.train.setup import TrainingSetup
from hvdtrain.train.survivors import Standing
from hvdtrain.train.terminal import Terminal, closing_lines, epoch_lines, stop_lines


@collective
def make_summary(
    step_plan: StepPlan, world: Context, progress: Progress, final: Values, loop: TrainingLoop
) -> Summary:
    """Return the summary of a run that has ended."""
    options, topology, best = step_plan.options, world.topology, progress.best
    total, communicate = progress.total_seconds, progress.communicate_seconds
    return Summary(
        world_size=topology.size,
        hosts=topology.hosts,
        host_names=list(dict.fromkeys(topology.hostnames)),
        engine=world.engine_name,
        framework=options.framework,
        exchange=options.exchange,
        global_batch_size=step_plan.global_batch_size,
        base_lr=options.base_lr,
        scaled_lr=step_plan.target_lr,
        epochs=progress.epoch,
        final=final,
        samples=progress.samples,
        samples_per_second=progress.samples / total,
        seconds=Seconds(total, total - communicate, communicate),
        weights_sha256=allgather_object(weights_digest(loop.state.weights()), "weights"),
        steps=progress.step,
        best=None if best is None else asdict(best),
        ended="early stop" if progress.epoch < options.epochs else "epochs",
        parameter_server=_parameter_server(options, loop.pushes),
    )


def _parameter_server(options: TrainOptions, pushes: Pushes | None) -> dict[str, Any] | None:
    settings = options.parameter_server
    if settings is None or pushes is None:
        return None
    given = asdict(settings)
    given["max_staleness"] = given.pop("staleness")  # pushes have counts of that name
    return {**given, **pushes.record()}


def weights_digest(weights: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the SHA-256 of all weights of this rank's model.

    It covers names, types, shapes and bytes, in the order of `weights`.
    """
    digest = hashlib.sha256()
    for name, array in weights.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Run:
    """A training run that is ready to start."""

    def __init__(
        self,
        options: TrainOptions,
        setup: TrainingSetup,
        terminal: Terminal,
        heartbeat: Heartbeat,
        run_log: RunLog | None,
        snapshots: Snapshots | None = None,
        failures: Sequence[RanksLost] = (),
        joins: Sequence[RanksJoined] = (),
    ) -> None:
        self._options, self._test_samples = options, setup.test_samples
        self._world, self._step_plan, self._loop = setup.world, setup.step_plan, setup.loop
        self._progress, self._terminal = setup.start.progress, terminal
        self._heartbeat, self._run_log = heartbeat, run_log
        self._triggers = Triggers.of(options)
        self._clock = RunClock(setup.world, self._progress)
        self._taken, self._reserved, self._watch_due = 0, False, False
        self._pause_due = False  # after the steps taken
        self._unlogged, self._unlogged_seconds = Totals(), 0.0
        self._evaluated: MetricsRecord | None = None
        self._saved_step, self._first_step = -1, self._progress.step
        self._failures, self._joins = failures, joins  # before this run, for the summary
        self._directory, self._snapshots = setup.start.directory, snapshots
        self.left: tuple[int, ...] = ()
        # Where a pause that is under way began. Survivors take it again if one of them was in it.
        self._pausing = self._progress if setup.start.pauses else None

    @collective
    def run(self) -> Summary | None:
        """Train the epochs that are left and write the results."""
        while self._progress.epoch < self._options.epochs and not self._is_stale:
            if self._heartbeat.stop_rank is not None:
                self._stop()
                return None
            if self._heartbeat.leaving:
                self._let_leave(self._heartbeat.leaving)
            if self._heartbeat.joins:
                self._let_join()
            self._train_epoch()
        return self._finish()

    @property
    def _is_stale(self) -> bool:
        """Whether evaluations have not improved for as long as --early-stop allows."""
        patience, best = self._options.early_stop, self._progress.best
        return patience is not None and best is not None and best.since >= patience

    @collective
    def _train_epoch(self) -> None:
        """Train until the epoch ends or the ranks are to stop."""
        steps, done = self._step_plan.steps_per_epoch, self._progress.done
        if self._pausing is not None and done < self._step_plan.samples:
            self._pause(False, 0.0)
            self._pausing = None
        title = f"epoch {self._progress.epoch + 1}/{self._options.epochs}"
        later = (self._options.epochs - self._progress.epoch - 1) * steps
        self._terminal.begin(title, steps, done // self._step_plan.global_batch_size, later)
        whole, samples, seconds = False, self._progress.samples, 0.0
        while not (whole or self._is_stale or self._heartbeat.interrupts):
            epoch, done, began = self._progress.epoch, self._progress.done, time.perf_counter()
            with on_this_rank():
                learned = self._loop.train(epoch, done, self._after_step)
            lasted = time.perf_counter() - began
            seconds += lasted
            self._unlogged, self._unlogged_seconds = (
                self._unlogged + learned,
                self._unlogged_seconds + lasted,
            )
            self._progress = self._clock.read(self._progress.after(learned, self._taken))
            if self._options.non_finite == "stop":
                require_finite(learned, self._taken, self._progress.step)
            self._taken, self._pause_due, self._pausing = 0, False, self._progress
            whole = self._progress.done == self._step_plan.samples
            self._pause(whole, (self._progress.samples - samples) / seconds)
            self._pausing = None

    @property
    def standing(self) -> Standing:
        """How far this rank has got, for the survivors of others."""
        plan, reached = self._step_plan, self._progress
        if self._taken:
            done = min(reached.done + self._taken * plan.global_batch_size, plan.samples)
            reached = replace(
                reached,
                done=done,
                step=reached.step + self._taken,
                samples=reached.samples + done - reached.done,
            )
        paused = self._pausing is None and not self._pause_due
        before = self._pausing or reached
        read = self._clock.read
        return Standing(read(reached), read(before), paused, self._loop.state, self._directory)

    @collective
    def require_ranks(self, left: int) -> None:
        """Save and end the run if too few ranks are left."""
        least = self._world.config.min_ranks
        if left >= least:
            return
        if self._progress.step != self._saved_step:
            self._save(False)
        run_log = self._run_log
        text = f"{counted(left, 'rank')} left, fewer than --min-np {least}"
        call_on_root(lambda: run_log.stopped(text) if run_log is not None else None)
        directory = call_on_root(lambda: str(run_log.directory) if run_log is not None else "")
        raise TooFewRanksError(
            f"{text}: {self._progress.text} are saved, resume with --out {directory} --resume auto"
        )

    @collective
    def _let_leave(self, leaving: tuple[int, ...]) -> None:
        """Part from ranks that were asked to leave, when all that was due is done."""
        topology, failures = self._world.topology, self._world.failures
        assert failures is not None  # else no rank is asked
        self.require_ranks(topology.size - len(leaving))
        self._take_snapshot_now(leaving)
        if self._run_log is not None and topology.rank in leaving:
            self._run_log.close("stopped")
        # No rank may miss others that are through already, or a checkpoint that is not written yet.
        if failures.agree(True):
            self.left = leaving
        raise RanksLostError(f"{topology.title} {format_ranks(leaving)} left", leaving)

    @collective
    def _let_join(self) -> NoReturn:
        """Interrupt the run for a rank that joins, when all that was due is done."""
        assert self._world.failures is not None  # else no rank is started
        self._take_snapshot_now()
        self._world.failures.agree(True)  # no rank may miss others that are through already
        raise HostsUpdatedInterrupt

    @collective
    def _take_snapshot_now(self, leaving: tuple[int, ...] = ()) -> None:
        """Take a snapshot, if any are needed, so that no step is taken twice."""
        if self._snapshots is not None:
            self._loop.synchronize()
            self._take_snapshot(leaving)

    @collective
    def _after_step(self) -> bool:
        """Return whether to continue without a pause."""
        self._taken += 1
        step = self._progress.step + self._taken
        self._terminal.advance()
        if not self._reserved:
            self._reserved = True
            self._loop.gather_state()
            if self._run_log is not None:
                with on_this_rank():
                    self._loop.state.reserve()
        if self._heartbeat.after_step() and self._run_log is not None:
            self._run_log.note(self._heartbeat.report, step, self._clock.total_seconds)
            self._terminal.show_slowest(*self._run_log.statistics.slowest)
        heartbeat = self._heartbeat
        due = heartbeat.interrupts or bool(heartbeat.due - {SNAPSHOT})
        self._pause_due = due or self._triggers.pauses(step) or self._snapshot_is_due(step, None)
        return not self._pause_due

    @collective
    def _snapshot_is_due(self, step: int, epoch: int | None) -> bool:
        """Return whether to take a snapshot after a step, which may end an epoch."""
        due, size = self._heartbeat.due, self._world.topology.size
        snapshots = self._snapshots
        # It must not change the weights, so it waits until they are equal anyway.
        return (
            snapshots is not None
            and snapshots.due(step, epoch, due, size)
            and self._loop.synchronized
        )

    @collective
    def _take_snapshot(self, leaving: tuple[int, ...] = ()) -> None:
        """Keep the state of all ranks in memory."""
        began, run_log, loop = time.perf_counter(), self._run_log, self._loop
        snapshots = self._snapshots
        assert snapshots is not None
        exchange = loop.exchange_record()
        loop.gather_state()

        def content() -> dict[str, Any]:
            assert run_log is not None  # on rank 0
            progress = self._clock.read(self._progress)
            return run_log.content(progress, self._step_plan.samples, loop, exchange)

        snapshots.take(self._progress.step, content, leaving)
        seconds = snapshots.seconds_to_next(time.perf_counter() - began)
        self._heartbeat.done(SNAPSHOT, seconds)

    @collective
    def _pause(self, whole: bool, speed: float) -> None:
        """Do what is due between two steps."""
        progress, step = self._progress, self._progress.step
        if self._triggers.logs(step):
            self._log()
        lines: list[MetricsRecord] = []
        if whole:
            if progress.part.samples:  # else ranks ended before the sums were collected
                values = progress.part.values(self._loop.metrics)
                lines.append(self._metrics("train", values, speed))
            self._progress = progress.next_epoch()
        better = False
        if self._is_due(EVALUATE, self._triggers.evaluate, whole):
            better = self._evaluate(lines)
        if lines:
            self._terminal.print(epoch_lines(lines, self._options.epochs))
            if self._run_log is not None:
                self._run_log.write(lines)
        self._watch_due |= self._triggers.watches(step, whole)
        # A check must not change the weights, so it waits until they are equal anyway.
        if self._watch_due and self._loop.synchronized:
            self._compare_ranks()
        stops = self._heartbeat.stop_rank is not None
        if better or stops or self._is_due(SAVE, self._triggers.save, whole):
            self._save(better)
        if self._snapshot_is_due(step, self._progress.epoch if whole else None):
            self._take_snapshot()

    def _is_due(self, timer: str, every: Interval, whole: bool) -> bool:
        """Return whether to evaluate or to save after a step, which may end an epoch."""
        return (
            timer in self._heartbeat.due
            or every.after_step(self._progress.step)
            or (whole and every.after_epoch(self._progress.epoch))
        )

    def _log(self) -> None:
        """Write the means over the steps since the last such line."""
        if not self._unlogged.samples:
            return
        speed = self._unlogged.samples / self._unlogged_seconds
        line = self._metrics("step", self._unlogged.values(self._loop.metrics), speed)
        self._unlogged, self._unlogged_seconds = Totals(), 0.0
        self._terminal.show_training(line)
        if self._run_log is not None:
            self._run_log.write_step(line)

    @collective
    def _evaluate(self, lines: list[MetricsRecord]) -> bool:
        """Evaluate and add a line; return whether it is the best evaluation so far."""
        began = time.perf_counter()
        self._loop.synchronize()
        with on_this_rank():
            values = self._loop.evaluate()
        self._heartbeat.done(EVALUATE)
        if not values:
            return False
        speed = self._test_samples / (time.perf_counter() - began)
        self._evaluated = self._metrics("test", values, speed)
        lines.append(self._evaluated)
        return self._update_best(values)

    def _update_best(self, values: Values) -> bool:
        """Compare an evaluation with the best one so far, which is the same on all ranks."""
        name, best = self._options.best, self._progress.best
        value = require_number(values, name, self._loop.test_metrics)
        before = best.value if best is not None and best.name == name else None
        better = improved(value, before, name, self._loop.test_metrics)
        if better:
            best = BestEvaluation(name, value, self._epochs, self._progress.step)
        elif best is not None:
            best = replace(best, since=best.since + 1)
        self._progress = replace(self._progress, best=best)
        return better

    @property
    def _epochs(self) -> float:
        return self._progress.epoch + self._progress.done / self._step_plan.samples

    def _metrics(self, split: str, values: Values, speed: float) -> MetricsRecord:
        progress = self._progress
        epochs = self._epochs
        return MetricsRecord(
            epochs, progress.step, split, values, self._loop.lr, speed, self._clock.total_seconds
        )

    @collective
    def _compare_ranks(self) -> None:
        """Check that all ranks hold the same weights and optimizer state."""
        self._watch_due = False
        difference = replica_difference(self._loop.checksums())
        if difference is not None:
            raise TrainingError(f"step {self._progress.step}: {difference}")

    @collective
    def _save(self, best: bool) -> None:
        """Start writing a checkpoint on rank 0."""
        self._heartbeat.done(SAVE)
        self._loop.synchronize()
        self._saved_step = self._progress.step
        exchange = self._loop.exchange_record()
        self._loop.gather_state()
        if self._run_log is not None:
            progress = self._clock.read(self._progress)
            self._run_log.save(progress, self._step_plan.samples, self._loop, exchange, best)

    @collective
    def _stop(self) -> None:
        """Print, after the checkpoint is written, that the run was stopped."""
        run_log, rank = self._run_log, self._heartbeat.stop_rank or 0
        directory = call_on_root(lambda: str(run_log.directory) if run_log is not None else "")
        lines = stop_lines(rank, self._progress, directory)
        call_on_root(lambda: run_log.stopped(lines[0]) if run_log is not None else None)
        self._terminal.end(lines)

    @collective
    def _final_values(self) -> Values:
        """Return the evaluation of the final weights."""
        last, step = self._evaluated, self._progress.step
        if last is not None and last.step == step:
            return last.values
        if step == self._first_step:  # nothing was trained: the run log has it already
            self._loop.synchronize()
            with on_this_rank():
                return self._loop.evaluate()
        lines: list[MetricsRecord] = []
        better = self._evaluate(lines)
        if self._run_log is not None and lines:
            self._run_log.write(lines)
        if better:
            self._save(True)
        return lines[0].values if lines else {}

    @collective
    def _finish(self) -> Summary:
        """Write the last checkpoint and the summary."""
        final = self._final_values()
        if self._progress.step != self._saved_step:
            self._save(False)
        self._progress = self._clock.read(self._progress)
        summary = make_summary(self._step_plan, self._world, self._progress, final, self._loop)
        summary = replace(summary, failures=self._failures, joins=self._joins)
        run_log = self._run_log
        files = call_on_root(lambda: run_log.ended(summary) if run_log is not None else [])
        directory = str(run_log.directory) if run_log is not None else ""
        self._terminal.end(closing_lines(summary, directory, files))
        return summary
