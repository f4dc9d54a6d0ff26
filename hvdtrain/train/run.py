"""One training run: its epochs, and what is done after which step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hvdtrain.collective import collective
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.errors import HostsUpdatedInterrupt, RanksLostError, TooFewRanksError, TrainingError
from hvdtrain.topology import format_ranks
from hvdtrain.train.callbacks import Callbacks, CallbackState
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.gather import on_this_rank
from hvdtrain.train.loop.heartbeat import Heartbeat, peak_memory
from hvdtrain.train.loop.replica_check import replica_difference, require_finite
from hvdtrain.train.loop.snapshots import (
    EVALUATE,
    LOG,
    SAVE,
    SNAPSHOT,
    WATCH,
    Snapshots,
    intervals_of,
)
from hvdtrain.train.metrics import Totals, Values, improved, require_number
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records import MetricsRecord, Seconds, Summary
from hvdtrain.train.resume import BestEvaluation, Progress, RunState
from hvdtrain.train.run_log import RunLog
from hvdtrain.train.setup import TrainingSetup
from hvdtrain.train.terminal import Terminal, closing_lines, dry_run_line, epoch_lines, stop_lines


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
        callbacks: Callbacks,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._options, self._test_samples = options, setup.test_samples
        self._world, self._step_plan, self._loop = setup.world, setup.step_plan, setup.loop
        self._state, self._terminal = setup.state, terminal
        self._state.start_clock(setup.world)
        self._state.trained = setup.loop.state
        self._heartbeat, self._run_log = heartbeat, run_log
        self._intervals = intervals_of(options)
        self._reserved, self._watch_due = False, False
        self._unlogged, self._unlogged_seconds = Totals(), 0.0
        self._evaluated: MetricsRecord | None = None
        self._train_seconds = 0.0
        self._saved_step, self._first_step = -1, self._progress.step
        self._callbacks, self._snapshots = callbacks, snapshots
        self._epoch = self._progress.epoch + 1
        self.left: tuple[int, ...] = ()

    @collective
    def run(self) -> Summary | None:
        """Train the epochs that are left and write the results."""
        self._call("on_train_begin")
        while self._progress.epoch < self._step_plan.epochs and not self._ends:
            stop_rank = self._heartbeat.stop_rank
            if stop_rank is not None:  # its checkpoint is written
                place = None if self._options.dry_run else self._state.directory
                lines = stop_lines(stop_rank, self._progress, place)
                self._log_stop(lines[0])
                self._terminal.end(lines)
                return None
            if self._heartbeat.leaving:
                self._let_leave(self._heartbeat.leaving)
            if self._heartbeat.joins:
                self._let_join()
            self._train_epoch()
        self._call("on_train_end")
        return self._finish()

    @collective
    def _call(self, moment: str, train: Callable[[], Values] = Values) -> None:
        def state() -> CallbackState:
            loop, topology = self._loop, self._world.topology
            test = {} if self._evaluated is None else self._evaluated.values
            step = self._progress.step + self._state.taken
            place = topology.rank, topology.size
            restore = self._restore_best if self._test_samples else None
            lr = self._step_plan.lr(max(step - 1, 0))  # Keras on jax knows its own after `fit` only
            return CallbackState(
                self._epoch, step, lr, train(), test, *loop.lend(), *place, restore
            )

        self._callbacks.call(moment, state)

    @collective
    def _restore_best(self) -> None:
        """Load the weights of the best evaluation on all ranks."""
        best, run_log = self._progress.best, self._run_log
        if best is None:
            raise TrainingError("there is no evaluation yet whose weights could be restored")
        self._loop.synchronize()  # which may change weights only before
        step = best.step
        self._loop.state.load_weights(call_on_root(lambda: run_log and run_log.best_weights(step)))

    @property
    def _progress(self) -> Progress:
        return self._state.progress

    @property
    def _ends(self) -> bool:
        """Whether a callback, or evaluations that have not improved, end the run early."""
        patience, best = self._options.early_stop, self._progress.best
        is_stale = patience is not None and best is not None and best.since >= patience
        return is_stale or self._callbacks.stop_rank is not None

    @collective
    def _train_epoch(self) -> None:
        """Train until the epoch ends or the ranks are to stop."""
        steps, done, state = self._step_plan.steps_per_epoch, self._progress.done, self._state
        if state.pausing is not None and done < self._step_plan.samples:
            self._pause(False, 0.0)
            state.pausing = None
        self._epoch = self._progress.epoch + 1
        if not done:
            self._call("on_epoch_begin")
        title = f"epoch {self._epoch}/{self._step_plan.epochs}"
        later = (self._step_plan.epochs - self._progress.epoch - 1) * steps
        self._terminal.begin(title, steps, done // self._step_plan.global_batch_size, later)
        whole, samples, seconds = False, self._progress.samples, 0.0
        while not (whole or self._ends or self._heartbeat.interrupts):
            began, before = time.perf_counter(), self._progress
            with on_this_rank():
                learned = self._loop.train(before.epoch, before.done, self._count_step)
            lasted = time.perf_counter() - began
            seconds += lasted
            self._train_seconds += lasted
            self._unlogged += learned
            self._unlogged_seconds += lasted
            state.progress = state.timed(before.after(learned, state.taken))
            if self._options.non_finite == "stop":
                require_finite(learned, state.taken, self._progress.step)
            state.taken, state.pause_due, state.pausing = 0, False, self._progress
            whole = self._progress.done == self._step_plan.samples
            self._pause(whole, (self._progress.samples - samples) / seconds)
            state.pausing = None

    def stopped(self) -> RunState:
        """Return how far this rank has got when others ended."""
        self._heartbeat.repeat_stop()
        plan, state, last = self._step_plan, self._state, self._progress
        state.epoch_samples = plan.samples
        if state.pausing is not None:
            state.pausing = state.timed(state.pausing)
        done = min(last.done + state.taken * plan.global_batch_size, plan.samples)
        samples = last.samples + done - last.done
        reached = replace(last, done=done, step=last.step + state.taken, samples=samples)
        state.progress = state.timed(reached)
        return state

    @collective
    def require_ranks(self, left: int) -> None:
        """Save and end the run if too few ranks are left."""
        least = self._world.config.min_ranks
        if left >= least:
            return
        if self._progress.step != self._saved_step:
            self._save(False)
        text = f"{counted(left, 'rank')} left, fewer than --min-np {least}"
        self._log_stop(text)
        raise TooFewRanksError(
            f"{text}: {self._progress.text} are saved, resume with --out {self._state.directory} "
            "--resume auto"
        )

    @collective
    def _log_stop(self, text: str) -> None:
        """Leave a note for a resume, once the checkpoint is written."""
        run_log = self._run_log
        call_on_root(lambda: run_log.stopped(text) if run_log is not None else None)

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
    def _count_step(self) -> bool:
        """Return whether to continue without a pause."""
        self._state.taken += 1
        step = self._progress.step + self._state.taken
        self._terminal.advance()
        if not self._reserved:
            self._reserved = True
            self._loop.gather_state()
            if self._run_log is not None:
                with on_this_rank():
                    self._loop.state.reserve()
        if self._heartbeat.count_step() and self._run_log is not None:
            self._run_log.note(self._heartbeat.report, step, self._state.total_seconds)
            self._terminal.show_slowest(*self._run_log.statistics.slowest)
        self._call("on_train_batch_end", lambda: {"loss": self._loop.own_loss()})
        heartbeat = self._heartbeat
        due = heartbeat.interrupts or bool(heartbeat.due - {SNAPSHOT})
        due |= self._callbacks.stop_rank is not None
        self._state.pause_due = (
            due
            or any(every.ends_with_step(step) for every in self._intervals.values())
            or self._snapshot_is_due(step, None)
        )
        return not self._state.pause_due

    @collective
    def _snapshot_is_due(self, step: int, epoch: int | None) -> bool:
        """Return whether to take a snapshot after a step, which may end an epoch."""
        if self._snapshots is None:
            return False
        due = self._snapshots.due(step, epoch, self._heartbeat.due, self._world.topology.size)
        # It must not change the weights, so it waits until they are equal anyway.
        return due and self._loop.synchronized

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
            progress = self._state.timed(self._progress)
            return run_log.content(progress, exchange)

        snapshots.take(self._progress.step, content, leaving)
        seconds = snapshots.seconds_to_next(time.perf_counter() - began)
        self._heartbeat.done(SNAPSHOT, seconds)

    @collective
    def _pause(self, whole: bool, speed: float) -> None:
        """Do what is due between two steps."""
        progress, step = self._progress, self._progress.step
        if self._is_due(LOG, whole):
            self._log()
        lines: list[MetricsRecord] = []
        values = Values()
        if whole:
            if progress.part.samples:  # else ranks ended before the sums were collected
                values = progress.part.values(self._loop.metrics)
                lines.append(self._metrics("train", values, speed))
            self._state.progress = progress.next_epoch()
        better = False
        if self._is_due(EVALUATE, whole):
            better = self._evaluate(lines)
        if whole:
            self._call("on_epoch_end", lambda: values)
        if lines:
            self._terminal.print(epoch_lines(lines, self._step_plan.epochs))
            if self._run_log is not None:
                self._run_log.write(lines)
        self._watch_due |= self._is_due(WATCH, whole)
        # A check must not change the weights, so it waits until they are equal anyway.
        if self._watch_due and self._loop.synchronized:
            self._watch_due = False
            difference = replica_difference(self._loop.checksums())
            if difference is not None:
                raise TrainingError(f"step {self._progress.step}: {difference}")
        stops = self._heartbeat.stop_rank is not None
        if better or stops or self._is_due(SAVE, whole):
            self._save(better)
        if self._snapshot_is_due(step, self._progress.epoch if whole else None):
            self._take_snapshot()

    def _is_due(self, what: str, whole: bool) -> bool:
        """Return whether something is due after a step, which may end an epoch."""
        every = self._intervals.get(what)
        return what in self._heartbeat.due or (
            every is not None
            and (
                every.ends_with_step(self._progress.step)
                or (whole and every.ends_with_epoch(self._progress.epoch))
            )
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
        better = self._update_best(values)
        self._call("on_test_end")
        return better

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
        self._state.progress = replace(self._progress, best=best)
        return better

    @property
    def _epochs(self) -> float:
        return self._progress.epoch + self._progress.done / self._step_plan.samples

    def _metrics(self, split: str, values: Values, speed: float) -> MetricsRecord:
        step, seconds = self._progress.step, self._state.total_seconds
        return MetricsRecord(self._epochs, step, split, values, self._loop.lr, speed, seconds)

    @collective
    def _save(self, best: bool) -> None:
        """Start writing a checkpoint on rank 0."""
        self._heartbeat.done(SAVE)
        self._loop.synchronize()
        self._saved_step = self._progress.step
        exchange = self._loop.exchange_record()
        self._loop.gather_state()
        if self._run_log is not None:
            progress = self._state.timed(self._progress)
            self._run_log.save(progress, exchange, best)

    @collective
    def _final_values(self) -> Values:
        last, step = self._evaluated, self._progress.step
        changed = self._callbacks.take("on_train_end")
        known = last is not None and last.step == step
        if last is not None and known and not changed:
            return last.values
        if step == self._first_step or known:  # the run log has a line of this step already
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
        if self._progress.step != self._saved_step or self._callbacks.take("on_train_end"):
            self._save(False)
        summary = self._summary(final)
        run_log = self._run_log
        files = call_on_root(lambda: run_log.ended(summary) if run_log is not None else [])
        lines = closing_lines(summary, str(self._state.directory), files)
        if self._options.dry_run:  # nothing of it stays
            step = self._train_seconds / max(summary.steps, 1)
            lines[-1:] = [dry_run_line(step, allgather_object(peak_memory(), "peak memory"))]
        self._terminal.end(lines)
        return summary

    @collective
    def _summary(self, final: Values) -> Summary:
        options, topology, state = self._options, self._world.topology, self._state
        progress = state.timed(state.progress)
        total, communicate = progress.total_seconds, progress.communicate_seconds
        server: dict[str, Any] | None = None
        if options.parameter_server is not None and self._loop.pushes is not None:
            server = asdict(options.parameter_server)
            server["max_staleness"] = server.pop("staleness")  # pushes have counts of that name
            server |= self._loop.pushes.record()
        rank, ended = self._callbacks.stop_rank, "epochs"
        if progress.epoch < self._step_plan.epochs:
            ended = "early stop" if rank is None else f"callback of rank {rank}"
        return Summary(
            world_size=topology.size,
            hosts=topology.hosts,
            host_names=list(dict.fromkeys(topology.hostnames)),
            engine=self._world.engine_name,
            framework=options.framework,
            exchange=options.exchange,
            global_batch_size=self._step_plan.global_batch_size,
            base_lr=options.base_lr,
            scaled_lr=self._step_plan.target_lr,
            epochs=progress.epoch,
            final=final,
            samples=progress.samples,
            samples_per_second=progress.samples / total,
            seconds=Seconds(total, total - communicate, communicate),
            weights_sha256=allgather_object(weights_digest(self._loop.state.weights()), "weights"),
            steps=progress.step,
            best=None if progress.best is None else asdict(progress.best),
            ended=ended,
            parameter_server=server,
            failures=state.failures,
            joins=state.joins,
        )
