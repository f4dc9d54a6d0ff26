"""The main job: train a recipe on all ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hvdtrain.core.objects import call_on_root
from hvdtrain.train.agenda import Agenda
from hvdtrain.train.books import Books
from hvdtrain.train.building import Built, Make, build
from hvdtrain.train.heartbeat.pulse import Pulse
from hvdtrain.train.heartbeat.signals import StopSignals
from hvdtrain.train.heartbeat.spans import Spans
from hvdtrain.train.lines import header_lines
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records.environment import write_environment
from hvdtrain.train.records.files import refusing
from hvdtrain.train.records.results import Summary
from hvdtrain.train.resumption import Resumption
from hvdtrain.train.run import Run
from hvdtrain.train.terminal import Terminal, on_terminal
from hvdtrain.train.tracking.tracker import RunFacts
from hvdtrain.train.tracking.trackers import open_trackers

__all__ = ["train"]


def train(options: TrainOptions, make: Make | None = None) -> Summary | None:
    """Train a recipe and write its results (collective; initialises hvdtrain).

    Every rank gets a summary; its times are the rank's own. Rank 0's is in summary.json. None where
    a signal to any rank (SIGUSR1, or SIGTERM where there is time) has stopped the run before its
    end: then there are a checkpoint to go on from and a file `requeue`.

    Args:
        options: the same on every rank.
        make: returns the recipe; None: the one that the options name.

    Raises:
        UsageError: the options differ between ranks, or do not fit the world, the data, or what
            lies in the directory; or the framework is not installed.
        TrainingError: the ranks' weights differ, or a loss or gradient is not finite.
    """
    with StopSignals() as signals:
        return _train(options, make, signals)


def _train(options: TrainOptions, make: Make | None, signals: StopSignals) -> Summary | None:
    built = build(options, make, Resumption(options))
    topology = built.world.topology
    speaks = topology.rank == 0 and not options.quiet
    with Terminal(speaks, bar=speaks and on_terminal()) as terminal:
        terminal.say(header_lines(options, built))
        books = _open_books(options, built)
        pulse = Pulse(built.world, signals, Agenda.of(options).timers)
        try:
            return Run(options, built, terminal, pulse, books).run()
        finally:
            if books is not None:
                books.close()


def _open_books(options: TrainOptions, built: Built) -> Books | None:
    """Open what rank 0 writes to; None on the others (collective).

    Raises:
        UsageError: on every rank, a tracker cannot be used.
    """
    opened: list[Books] = []

    def open_them() -> None:
        topology, start = built.world.topology, built.start
        write_environment(start.directory, options.with_absolute_paths(), topology.hostnames)
        facts = RunFacts(
            start.directory.name,
            start.directory,
            {**_parameters(options), "ranks": topology.size, "engine": built.world.engine_name},
            start.progress.step if start.resumed else None,
        )
        trackers = open_trackers(
            options.track, facts, options.tracking_uri, options.experiment, options.run_name
        )
        sent = built.loop.gradient_bytes if topology.size > 1 else 0
        spans = Spans(sent)
        opened.append(Books(start.directory, options, built.world, built.threads, spans, trackers))

    def open_or_refuse() -> None:
        with refusing(built.start.directory):
            open_them()

    call_on_root(open_or_refuse)
    return opened[0] if opened else None


def _parameters(options: TrainOptions) -> dict[str, Any]:
    """Return the options and the arguments of the recipe, flat."""
    parameters = asdict(options)
    arguments = parameters.pop("set")
    return {**parameters, **{f"set.{name}": value for name, value in arguments.items()}}
