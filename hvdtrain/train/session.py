"""Training: from Python with `fit`, and the session that sets up a run and survives lost ranks."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.elastic import require_all, tells_of_lost_ranks
from hvdtrain.core.objects import allgather_object, broadcast_object, call_on_root
from hvdtrain.core.recovery import Recovery
from hvdtrain.errors import HostsUpdatedInterrupt, HvdtrainError, TrainingError, UsageError
from hvdtrain.train.callbacks import Callbacks
from hvdtrain.train.checkpoints import (
    NO_POSITION,
    LoadedCheckpoint,
    TensorLibrary,
    load_checkpoint,
    newest_good,
)
from hvdtrain.train.find import FoundBatchSize, FoundLr, run_batch_sizes, run_range_test
from hvdtrain.train.loop.gather import call_everywhere, code_of_recipe
from hvdtrain.train.loop.heartbeat import Heartbeat, StopSignals
from hvdtrain.train.loop.protocol import TrainingState
from hvdtrain.train.loop.snapshots import Snapshots, needs_snapshots, timers_of
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.records import (
    LOG,
    RanksJoined,
    RanksLost,
    Summary,
    drop_lines_after,
    usage_errors,
    write_environment,
)
from hvdtrain.train.resume import (
    RunState,
    StateLoader,
    WorldSettings,
    announced,
    checkpoint_content,
)
from hvdtrain.train.run import Run
from hvdtrain.train.run_log import RunLog
from hvdtrain.train.setup import RecipeFactory, TrainingSetup, join_world, set_up
from hvdtrain.train.terminal import (
    Terminal,
    failure_tags,
    header_lines,
    joined_line,
    lost_line,
    on_terminal,
)
from hvdtrain.train.tracking.tracker import RunInfo
from hvdtrain.train.tracking.trackers import open_trackers


@collective
def fit(
    recipe: str | Path | Callable[..., Recipe], *, callbacks: Sequence[Any] = (), **options: Any
) -> Summary | None:
    """Train a recipe on all ranks of this job, or on one without a launcher (collective).

        fit(recipe, set={"width": 96}, epochs=20, checkpoint_every="10 minutes")

    Args:
        recipe: function that returns a Recipe and is called once random generators are seeded; or,
            as on the command line, a built-in name or FILE.py[:FUNCTION].
        callbacks: called after those of the recipe.
        **options: options of `python -m hvdtrain train`, with _ for -; `set` holds the arguments of
            the function.

    Returns:
        A Summary, with the fields of summary.json as attributes; None if a signal stopped the run.

    Raises:
        TypeError: there is no such option.
        UsageError: an option is invalid, or does not fit the number of ranks, the data or the
            directory.
        TrainingError: weights differ between ranks, or a loss or gradient is not finite.
        KeyboardInterrupt: Ctrl-C has stopped the run, which is saved.
    """
    asked, make_recipe = _asked(recipe, options)
    if asked.find_lr or asked.find_batch_size:
        raise UsageError("find_lr and find_batch_size are functions beside fit: call these")
    return train(asked, make_recipe, callbacks)


@collective
def find_lr(
    recipe: str | Path | Callable[..., Recipe], steps: int = 100, **options: Any
) -> FoundLr:
    """Return what `train --find-lr STEPS` finds (collective); arguments as of `fit`.

    Raises:
        TrainingError: the loss did not fall, or a signal has stopped the steps.
    """
    asked, make_recipe = _asked(recipe, {**options, "find_lr": steps})
    found: FoundLr = find(asked, make_recipe)
    return found


@collective
def find_batch_size(
    recipe: str | Path | Callable[..., Recipe], steps: int = 10, **options: Any
) -> FoundBatchSize:
    """Return what `train --find-batch-size STEPS` finds (collective); arguments as of `fit`.

    Raises:
        TrainingError: the first size does not fit, or a signal has stopped the steps.
    """
    asked, make_recipe = _asked(recipe, {**options, "find_batch_size": steps})
    found: FoundBatchSize = find(asked, make_recipe)
    return found


def _asked(
    recipe: str | Path | Callable[..., Recipe], given: dict[str, Any]
) -> tuple[TrainOptions, RecipeFactory | None]:
    """Return the options of a function like `fit`, and what makes its recipe."""
    options = {**given}
    for name in ("out", "data_dir"):
        if isinstance(options.get(name), str):
            options[name] = Path(options[name])
    if not callable(recipe):
        return TrainOptions(recipe=str(recipe), **options), None
    asked = TrainOptions(recipe=_location(recipe), **options)
    data_dir = {} if asked.data_dir is None else {"data_dir": asked.data_dir}
    return asked, partial(recipe, **asked.set, **data_dir)


def _location(function: Callable[..., Recipe]) -> str:
    """Return the file and the name of a function, for the run's records and to find it again."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    name = getattr(function, "__name__", "recipe")
    return f"{file if file and file.endswith('.py') else 'session.py'}:{name.strip('<>')}"


@collective
def train(
    options: TrainOptions,
    make_recipe: RecipeFactory | None = None,
    callbacks: Sequence[Any] = (),
    noted: StopSignals | None = None,
) -> Summary | None:
    """Train a recipe and write its results (collective; initializes hvdtrain).

    `noted` are signals that a caller notes, before and after this run, too.
    """
    options = announced(options if options.dry_run is None else options.without_traces())
    with StopSignals() if noted is None else nullcontext(noted) as signals:
        session = _Session(options, make_recipe, signals, callbacks)
        try:
            summary = session.train()
        finally:
            session.remove_traces()
    # The run is saved, and has stopped.
    if noted is None and signals.interrupted and summary is None:
        raise KeyboardInterrupt
    return summary


@collective
def find(options: TrainOptions, make_recipe: RecipeFactory | None = None) -> Any:
    """Do what --find-lr or --find-batch-size asks for, and leave nothing (collective)."""
    run = run_range_test if options.find_lr else run_batch_sizes
    with StopSignals() as signals:
        try:
            with nullcontext() if make_recipe else code_of_recipe(options):
                return run(options.without_traces(), make_recipe, signals)
        except TrainingError:
            if signals.interrupted:
                raise KeyboardInterrupt from None
            raise


class _Session:
    """Trains, and continues with the remaining ranks if the engine can."""

    def __init__(
        self,
        options: TrainOptions,
        make_recipe: RecipeFactory | None,
        signals: StopSignals,
        callbacks: Sequence[Any],
    ) -> None:
        self._options, self._make_recipe, self._signals = options, make_recipe, signals
        self._callbacks = callbacks
        self._remover: subprocess.Popen[bytes] | None = None  # of a dry run's directory, on rank 0
        self._ranks = 0  # at the start
        self._run: Run | None = None
        self._before: RunState | None = None  # of this rank when others were lost
        self._joins_others = False  # until this rank trains with them
        self._interrupted = False  # for a rank that joins
        self._noticed = 0.0
        self._left: tuple[int, ...] = ()  # since the last recovery
        self._snapshots: Snapshots | None = None
        self._recoveries: list[tuple[Recovery, tuple[int, ...]]] = []

    @collective
    def train(self) -> Summary | None:
        goes_on = False
        while True:
            try:
                return self._go_on() if goes_on else self._begin()
            except Exception as error:
                if not self._survives(error):
                    raise
            if context.current().topology.rank in self._left:
                context.end_alone()
            self._recover()
            goes_on = True

    @collective
    def _begin(self) -> Summary | None:
        if join_world(self._options).newcomer:
            context.accept_newcomers()
            self._joins_others = True
            return self._go_on()
        setup = set_up(self._options, self._make_recipe, StateLoader(self._options))
        self._ranks = setup.world.topology.size
        lines = header_lines(self._options, setup)
        if setup.world.failures is not None and needs_snapshots(self._options, setup.loop):
            self._snapshots = Snapshots.of(self._options)
            lines.append(f"  elastic  {self._snapshots.text}")
        return self._run_once(setup, lines)

    def remove_traces(self) -> None:
        """Remove the directory of a dry run."""
        if self._remover is not None:
            # A line, because workers of a data loader may have the other end, too.
            self._remover.communicate(b"\n")

    def _survives(self, error: Exception) -> bool:
        """Return whether the run continues after an error, and note how far this rank has got."""
        if self._run is not None:
            self._noticed = time.perf_counter()
            self._left = self._run.left
            self._before, self._run = self._run.stopped(), None
        refused = isinstance(error, UsageError | TrainingError)
        if refused or (self._before is None and not self._joins_others):
            return False
        if isinstance(error, HostsUpdatedInterrupt):
            self._interrupted = True
            return True
        return tells_of_lost_ranks(error, context.current())

    @collective
    def _recover(self) -> None:
        """Go on in the next world (collective over the ranks that are left)."""
        if self._snapshots is not None:
            context.current().followers.clear()
        recovery = context.recover(self._left)
        if not recovery.lost and not self._interrupted:
            raise HvdtrainError("training failed with a lost-rank error, but all ranks are alive")
        self._recoveries.append((recovery, self._left))
        self._left, self._interrupted = (), False

    @collective
    def _go_on(self) -> Summary | None:
        """Train with the ranks that are left, and with one that has joined."""
        # Ranks that have joined do not know how the job began.
        known = None
        if self._before is not None:
            known = self._ranks, self._snapshots is not None
        known = broadcast_object(known, 0, "history")
        if known is None:  # those that were there before have the lowest numbers
            raise HvdtrainError("no rank is left that has trained: start the job again")
        self._ranks, needed = known
        if needed and self._snapshots is None:
            self._snapshots = Snapshots.of(self._options)
        before, snapshots = self._before, self._snapshots
        agreed: dict[str, Any] = {}
        reached = None  # the steps done, where it may go back to fewer
        if snapshots is None:
            agreed = _agree(self._options, before)
        else:
            reached = snapshots.find(-1 if before is None else before.progress.step)
        loader = SurvivorLoader(self._options, before, agreed, snapshots)
        ranks = self._ranks if self._options.elastic_batch == "keep" else None
        setup = set_up(self._options, self._make_recipe, loader, ranks)
        return self._run_once(setup, self._note_changes(setup, reached))

    @collective
    def _note_changes(self, setup: TrainingSetup, reached: int | None) -> list[str]:
        """Add the ranks that changed to the results, and return the lines about them."""
        lines: list[str] = []
        plan, state, progress = setup.step_plan, setup.state, setup.state.progress
        before = self._before or state
        failures, joins = list(before.failures), list(before.joins)
        common: dict[str, Any] = {
            "step": progress.step,
            "epoch": progress.epoch + progress.done / plan.samples,
            "trained_seconds": progress.total_seconds,
            "seconds": time.perf_counter() - self._noticed,
            "global_batch_size": plan.global_batch_size,
            "scaled_lr": plan.target_lr,
        }
        again = 0 if reached is None else max(reached - progress.step, 0)
        for recovery, leaving in self._recoveries:
            left = tuple(rank for rank in recovery.lost if rank in leaving)
            ended = tuple(rank for rank in recovery.lost if rank not in leaving)
            groups = (left, recovery.size_before - len(left), True), (ended, recovery.left, False)
            for ranks, number, asked in groups:
                if ranks:
                    failures.append(
                        RanksLost(lost=ranks, ranks=number, left=asked, again=again, **common)
                    )
                    lines.append(lost_line(failures[-1]))
            if recovery.joined:
                seconds = recovery.start_seconds
                joins.append(
                    RanksJoined(
                        joined=recovery.joined, ranks=recovery.size, start_seconds=seconds, **common
                    )
                )
                lines.append(joined_line(joins[-1]))
        self._recoveries = []
        if self._before is not None:  # which is read again if another rank is lost now
            self._before.failures, self._before.joins = failures, joins
        # Also for ranks that have joined.
        state.failures, state.joins = broadcast_object((failures, joins), 0, "changes")
        return lines

    @collective
    def _run_once(self, setup: TrainingSetup, lines: list[str]) -> Summary | None:
        options, world = self._options, setup.world
        if world.failures is not None:
            self._signals.accept_leave()
            context.accept_newcomers()
        if options.dry_run and world.topology.rank == 0 and self._remover is None:
            # It also removes it if this rank is killed: its input then ends.
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", 'read -r _; rm -rf -- "$0"', setup.state.directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        first = world.topology.rank == 0
        prints = first and not options.quiet
        log = setup.state.directory / LOG if first else None
        before = world.flight
        if not options.dry_run:
            world.keep_flight_record(str(setup.state.directory))
        with (
            ExitStack() as pages,
            Terminal(prints, bar=prints and on_terminal(), log=log) as terminal,
        ):
            terminal.print(lines)
            if options.live:
                page = _live_page(setup.state.directory)
                address = call_on_root(lambda: pages.enter_context(page))
                terminal.print([f"  live     {address}"], kept=False)  # others may read the log
            run_log = _open_run_log(options, setup)
            timers = {} if self._snapshots is None else self._snapshots.timers
            heartbeat = Heartbeat(world, self._signals, {**timers_of(options), **timers})
            try:
                given = setup.recipe.callbacks, self._callbacks
                found = call_everywhere(lambda: setup.loop.callbacks(*given))
                if self._before is None:  # else one may have asked before ranks were lost
                    for callback in found:
                        callback.stop = False  # of a run before this one
                calls = Callbacks(found, options.verbose)
                self._run = Run(
                    options, setup, terminal, heartbeat, run_log, calls, self._snapshots
                )
                self._before, self._joins_others = None, False
                if setup.state.failures:
                    self._run.require_ranks(world.topology.size)
                # A caller of `fit` gets what its own functions raise.
                with nullcontext() if self._make_recipe else code_of_recipe(options):
                    summary = self._run.run()
                require_all()
                if world.flight is not before:  # else it is that of the script
                    world.end_flight_record()
                return summary
            except Exception as error:
                context.note_error(error)  # all ranks may go on, or leave in order
                if isinstance(error, HvdtrainError):
                    terminal.keep([str(error)])
                raise
            finally:
                if run_log is not None:
                    run_log.close()


# It ends with the rank, which holds the other end of its input.
_SERVE = """
import os, sys, threading
threading.Thread(target=lambda: os._exit(len(sys.stdin.read())), daemon=True).start()
from hvdtrain.cli.main import group
group.main(["report", sys.argv[1], "--live"], standalone_mode=False)
"""


@contextmanager
def _live_page(directory: Path) -> Iterator[str]:
    """Serve the report of a run to browsers on this machine, at the address that is returned."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(directory)],
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C must not reach it
        **pipes,
    ) as process:
        assert process.stdout is not None
        said = ""
        try:
            for line in process.stdout:
                said = line.strip() or said
                if said.startswith("http:"):
                    break
            else:
                reason = said.rpartition("Error: ")[2] or "the server has ended"
                raise UsageError(f"--live: {reason}")
            yield said
        finally:
            process.terminate()  # workers of a data loader may have the other end of its input


@collective
def _open_run_log(options: TrainOptions, setup: TrainingSetup) -> RunLog | None:
    """Open the files and trackers of rank 0; return None on the other ranks."""
    opened: list[RunLog] = []

    @usage_errors(setup.state.directory)
    def open_files() -> None:
        topology, state = setup.world.topology, setup.state
        write_environment(state.directory, options.with_absolute_paths(), topology.hostnames)
        parameters = asdict(options)
        arguments = {f"set.{name}": value for name, value in parameters.pop("set").items()}
        info = RunInfo(
            state.directory.name,
            state.directory,
            {
                **parameters,
                **arguments,
                "ranks": topology.size,
                "engine": setup.world.engine_name,
            },
            state.progress.step if state.resumed else None,
            failure_tags(state.failures, state.joins),
        )
        trackers = open_trackers(
            "" if options.dry_run else options.track,
            info,
            options.tracking_uri,
            options.experiment,
            options.run_name,
        )
        opened.append(RunLog(options, setup, trackers))

    call_on_root(open_files)
    return opened[0] if opened else None


class SurvivorLoader(StateLoader):
    """Goes on with the state that the ranks that are left agree on, or with the last snapshot.

    Without either, with the newest checkpoint of the run, whose settings are for other ranks.
    """

    def __init__(
        self,
        options: TrainOptions,
        before: RunState | None,
        agreed: dict[str, Any],
        snapshots: Snapshots | None,
    ) -> None:
        super().__init__(options)
        self._before, self._agreed, self._snapshots = before, agreed, snapshots

    def find(self, library: TensorLibrary) -> WorldSettings:
        assert self._before is not None
        directory, resumed = self._before.directory, self._options.resume
        if self._snapshots is None:
            self.found = LoadedCheckpoint(Path("the ranks that are left"), self._agreed)
            self._agreed = {}  # as large as the model
            return WorldSettings()
        snapshot = self._snapshots.content()
        if snapshot:
            self.found = LoadedCheckpoint(Path("snapshot in memory"), snapshot)
        position = (snapshot["epoch"], snapshot["done"]) if snapshot else NO_POSITION
        # Else the best checkpoint of the directory could be one of steps that are taken again.
        with usage_errors(directory):
            saved = newest_good(directory, library, position)
        self._warn(saved.bad)
        if saved.path is not None:
            self.found = saved
        elif not snapshot and resumed not in ("auto", "never"):
            self.found = LoadedCheckpoint(Path(resumed), load_checkpoint(Path(resumed), library))
        return WorldSettings()

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunState:
        assert self._before is not None
        path, directory, times = self.found.path, self._before.directory, self._before.progress
        again = self.found.content.get("pausing", False)
        progress = replace(
            self._restore(epoch_samples, state),
            total_seconds=times.total_seconds,
            communicate_seconds=times.communicate_seconds,
        )
        origin = "the start: there is no snapshot and no checkpoint"
        if path is not None:
            origin = f"{path}, {progress.text} done"
        # Lines of the last step are written again where what follows it is done again.
        drop_lines_after(directory, progress.step - again)
        return RunState(
            directory, progress, origin, path is not None, pausing=progress if again else None
        )


@collective
def _agree(options: TrainOptions, before: RunState | None) -> dict[str, Any]:
    """Return what all ranks continue from, on rank 0: the state of one furthest ahead."""
    reached = None if before is None else (before.progress.step, before.paused)
    rows = allgather_object(reached, "progress")
    there = [row for row in rows if row is not None]
    furthest = max(step for step, _ in there)
    leader = [row and row[0] for row in rows].index(furthest)
    paused = all(row == (furthest, True) for row in there)
    content: dict[str, Any] = {}
    if before is not None and context.current().topology.rank == leader:
        progress = before.progress if paused else before.pausing or before.progress
        about = checkpoint_content(progress, options, before.epoch_samples)
        read = before.trained.snapshot()
        content = {**about, "pausing": not paused, **read()}
    if leader:
        content = broadcast_object(content, leader, "state")
    return content
