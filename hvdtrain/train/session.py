"""The main job: train a recipe on all ranks."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.devices import require_own_devices
from hvdtrain.errors import UsageError
from hvdtrain.train.agree import call_everywhere, require_same_options
from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.choose import choose_framework
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.report import header_lines
from hvdtrain.train.results import Summary
from hvdtrain.train.run import Run
from hvdtrain.train.start import begin
from hvdtrain.train.stopping import Stop, StopSignals
from hvdtrain.train.terminal import Terminal, on_terminal

__all__ = ["train"]


def train(options: TrainOptions) -> Summary | None:
    """Train a recipe and write its results (collective; initialises hvdtrain).

    Every rank gets a summary; its times are the rank's own. Rank 0's is in summary.json. None where
    a signal to any rank (SIGUSR1, or SIGTERM where there is time) has stopped the run before its
    end: then there are a checkpoint to go on from and a file `requeue`.

    Raises:
        UsageError: the options differ between ranks, or do not fit the world, the data, or what
            lies in the directory; or the framework is not installed.
    """
    with StopSignals() as signals:
        return _train(options, signals)


def _train(options: TrainOptions, signals: StopSignals) -> Summary | None:
    framework = choose_framework(options)
    engine = None if options.engine == "auto" else options.engine
    context.init(engine, deterministic=options.virtual_shards is not None)
    world = context.current()
    topology = world.topology
    require_same_options(options)
    _require_usable_lr(options, topology.size)
    recipe = framework.recipe
    data = call_everywhere(recipe.load_data)
    if topology.size > len(data.train):
        raise UsageError(
            f"{topology.size} ranks, but {recipe.name} has {len(data.train)} training samples: "
            "start at most one rank per sample"
        )
    devices = allgather_object(call_everywhere(partial(framework.prepare, topology)), "device")
    if not options.share_gpus:
        require_own_devices(devices)
    course = Course(options, topology, len(data.train))
    loop = framework.make_loop(course, data)
    start = call_on_root(partial(begin, options, loop.state))
    loop.broadcast()
    speaks = topology.rank == 0 and not options.quiet
    with Terminal(speaks, bar=speaks and on_terminal()) as terminal:
        if topology.rank == 0:
            for warning in start.warnings:
                print(f"hvdtrain: {warning}", file=sys.stderr, flush=True)
        directory = str(start.directory)
        title = framework.title
        names = [device.name for device in devices]
        terminal.say(header_lines(options, title, world, data, names, start.origin, directory))
        stop = Stop(world, signals)
        return Run(options, world, course, len(data.test), loop, start, terminal, stop).run()


def _require_usable_lr(options: TrainOptions, size: int) -> None:
    # Adam divides its rate by 0.1 in the first step.
    largest = float(np.finfo(options.dtype).max) / 16
    rate = options.scaled_lr(size)
    if not rate <= largest:
        raise UsageError(
            f"--lr {options.base_lr:g} is {rate:g} when scaled for {size} ranks, too large for "
            f"--dtype {options.dtype}: give a smaller one"
        )
