"""A training session: set up a run, train it, and close everything it has opened."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hvdtrain.core.objects import call_on_root
from hvdtrain.train.heartbeat.heartbeat import Heartbeat
from hvdtrain.train.heartbeat.rank_statistics import RankStatistics
from hvdtrain.train.heartbeat.signals import StopSignals
from hvdtrain.train.messages import header_lines
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records.environment import write_environment
from hvdtrain.train.records.files import usage_errors
from hvdtrain.train.records.results import Summary
from hvdtrain.train.resume import CheckpointLoader
from hvdtrain.train.run import Run
from hvdtrain.train.run_log import RunLog
from hvdtrain.train.setup import RecipeFactory, TrainingSetup, set_up
from hvdtrain.train.terminal import Terminal, on_terminal
from hvdtrain.train.tracking.tracker import RunInfo
from hvdtrain.train.tracking.trackers import open_trackers
from hvdtrain.train.triggers import Triggers

__all__ = ["train"]


def train(options: TrainOptions, make_recipe: RecipeFactory | None = None) -> Summary | None:
    """Train a recipe and write its results (collective; initializes hvdtrain).

    Args:
        options: options of the run, the same on every rank.
        make_recipe: returns the recipe; None: the options name it.

    Returns:
        The summary, on every rank with the rank's own times; rank 0's is in summary.json. None if a
        signal to any rank (SIGUSR1, or SIGTERM if there is time) stopped the run before its end:
        there is then a checkpoint to resume from and a file `requeue`.

    Raises:
        UsageError: the options differ between ranks, or do not fit the number of ranks, the data,
            or what is in the directory; or the framework is not installed.
        TrainingError: weights differ between ranks, or a loss or gradient is not finite.
    """
    with StopSignals() as signals:
        return _train(options, make_recipe, signals)


def _train(
    options: TrainOptions, make_recipe: RecipeFactory | None, signals: StopSignals
) -> Summary | None:
    setup = set_up(options, make_recipe, CheckpointLoader(options))
    topology = setup.world.topology
    prints = topology.rank == 0 and not options.quiet
    with Terminal(prints, bar=prints and on_terminal()) as terminal:
        terminal.print(header_lines(options, setup))
        run_log = _open_run_log(options, setup)
        heartbeat = Heartbeat(setup.world, signals, Triggers.of(options).timers)
        try:
            return Run(options, setup, terminal, heartbeat, run_log).run()
        finally:
            if run_log is not None:
                run_log.close()


def _open_run_log(options: TrainOptions, setup: TrainingSetup) -> RunLog | None:
    """Open the files and trackers of rank 0; return None on the other ranks (collective).

    Raises:
        UsageError: on every rank, a tracker cannot be used.
    """
    opened: list[RunLog] = []

    def open_files() -> None:
        topology, start = setup.world.topology, setup.start
        write_environment(start.directory, options.with_absolute_paths(), topology.hostnames)
        info = RunInfo(
            start.directory.name,
            start.directory,
            {**_parameters(options), "ranks": topology.size, "engine": setup.world.engine_name},
            start.progress.step if start.resumed else None,
        )
        trackers = open_trackers(
            options.track, info, options.tracking_uri, options.experiment, options.run_name
        )
        sent = setup.loop.gradient_bytes if topology.size > 1 else 0
        statistics = RankStatistics(sent)
        opened.append(
            RunLog(start.directory, options, setup.world, setup.threads, statistics, trackers)
        )

    def open_or_refuse() -> None:
        with usage_errors(setup.start.directory):
            open_files()

    call_on_root(open_or_refuse)
    return opened[0] if opened else None


def _parameters(options: TrainOptions) -> dict[str, Any]:
    """Return the options and the arguments of the recipe as one flat dictionary."""
    parameters = asdict(options)
    arguments = parameters.pop("set")
    return {**parameters, **{f"set.{name}": value for name, value in arguments.items()}}
