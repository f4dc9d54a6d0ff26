"""`hvdtrain bench`: compare hvdtrain with its peers, and predict how it scales."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from hvdtrain_bench.analysis.link import PRESETS, Link
from hvdtrain_bench.analysis.machine import largest_power_of_two
from hvdtrain_bench.analysis.paper import even_work
from hvdtrain_bench.harness.jobs import Launcher
from hvdtrain_bench.harness.settings import DEFAULT, FITTED, MODELS, QUICK
from hvdtrain_bench.suite import Paper, Suite

from hvdtrain.check.machine import find_cores
from hvdtrain.config import DEFAULT_BUCKET_BYTES, Config
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED, HvdtrainError, UsageError
from hvdtrain.launch.hosts.formats import read_file
from hvdtrain.train.options import BACKENDS, RUNS
from hvdtrain.train.records.files import new_directory, prepare_directory
from hvdtrain.world import promised_world

__all__ = ["command"]

_HERE = "here"
_LINKS = click.Choice([_HERE, *PRESETS])
_MODELS_HELP = "Instead of all; more than one may be given."
_PHASES = ("forward_ms", "backward_ms", "optimizer_ms")


class _DefaultsToAll(click.Group):
    """Runs everything where no benchmark is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("--help", "-h")):
            args = ["all", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_DefaultsToAll)
def command() -> None:
    """Compare hvdtrain with its peers, interleaved in one run.

    Peers are Horovod (where it is installed), DDP and gloo of PyTorch, and mpi4py. Every result
    is checked. Medians, ratios and their spread are printed, and a difference within the noise is
    called so. It starts ranks itself: about 10 minutes for all on two cores, with --quick one.
    """


def _measuring(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options of everything that measures."""
    for option in (
        click.option("--out", type=Path, metavar="DIR", help="For JSON and pictures."),
        click.option("--repeats", type=int, help="Turns of each; 8 at least tell from noise."),
        click.option("--threads", default=1, show_default=True, help="Of torch, per rank."),
        click.option("-hostfile", "--hostfile", help="Hosts in the MPI's own grammar."),
        click.option("ranks", "-np", "-n", "--num-ranks", type=int, help="The most ranks."),
        click.option("--quick", is_flag=True, help="Few sizes, one small model."),
    ):
        function = option(function)
    return function


@command.command("all")
@_measuring
def _all(**options: Any) -> int:
    """Run all of them."""

    def run(suite: Suite) -> None:
        suite.collectives()
        suite.steps()
        suite.idle()
        suite.scaling(Paper())

    return _run(run, options)


@command.command("collectives")
@_measuring
@click.option("sizes", "--bytes", type=int, multiple=True, help="Sizes, instead of the usual.")
def _collectives(sizes: tuple[int, ...], **options: Any) -> int:
    """Sum tensors: by size, many at once, beside a busy thread."""
    if any(size < 4 or size % 4 for size in sizes):
        raise UsageError(f"--bytes {min(sizes)}: give positive multiples of 4, a float32's size")
    return _run(Suite.collectives, options, sizes_bytes=sizes)


@command.command("steps")
@_measuring
@click.option("models", "--model", multiple=True, type=click.Choice(MODELS), help=_MODELS_HELP)
def _steps(models: tuple[str, ...], **options: Any) -> int:
    """Train four models on 2, 4, ... ranks."""
    return _run(Suite.steps, options, models=models)


@command.command("tensorflow")
@_measuring
def _tensorflow(**options: Any) -> int:
    """Train an MLP with TensorFlow, Horovod and tf.distribute."""
    return _run(Suite.tensorflow, options)


@command.command("keras")
@_measuring
@click.option(
    "backends", "--backend", multiple=True, type=click.Choice(BACKENDS), help=_MODELS_HELP
)
@click.option("models", "--model", multiple=True, type=click.Choice(FITTED), help=_MODELS_HELP)
def _keras(backends: tuple[str, ...], models: tuple[str, ...], **options: Any) -> int:
    """Fit two models with Keras, with and without communication."""
    return _run(lambda suite: suite.keras(backends or BACKENDS), options, models=models)


@command.command("checkpoint")
@_measuring
@click.option("models", "--model", multiple=True, type=click.Choice(MODELS), help=_MODELS_HELP)
def _checkpoint(models: tuple[str, ...], **options: Any) -> int:
    """Time steps while a checkpoint is written."""
    chosen = models or (() if options["quick"] else ("mlp",))
    return _run(Suite.checkpoint, options, models=chosen)


@command.command("loop")
@_measuring
def _loop(**options: Any) -> int:
    """Time the loop of `train` beside one written by hand."""
    return _run(Suite.loop, options)


@command.command("idle")
@_measuring
def _idle(**options: Any) -> int:
    """Watch the processor time of ranks that wait."""
    return _run(Suite.idle, options)


@command.command("scaling")
@_measuring
@click.option("models", "--model", multiple=True, type=click.Choice(MODELS), help=_MODELS_HELP)
@click.option("links", "--link", multiple=True, type=_LINKS, help="Instead of all; see --model.")
@click.option("--latency-us", type=float, help="Of a link of your own, in microseconds.")
@click.option("--gigabytes", type=float, help="The same link's bandwidth, per second.")
@click.option("--ranks-per-node", default=1, show_default=True, help="That share a network card.")
@click.option("--node-link", type=_LINKS, default=_HERE, help="Within a node.")
@click.option("--jitter-ms", type=float, help="By which ranks' steps differ.  [default: measured]")
@click.option("--forward-ms", type=float, help="Of a step of your own, and ...")
@click.option("--backward-ms", type=float, help="... its backward pass, and ...")
@click.option("--optimizer-ms", type=float, help="... its optimizer, and ...")
@click.option("--megabytes", type=float, help="... its gradients.")
def _scaling(models: tuple[str, ...], **options: Any) -> int:
    """Predict steps on 1 to 4,096 ranks on paper."""
    paper = _paper(options)
    return _run(lambda suite: suite.scaling(paper), options, models=models)


def _paper(options: dict[str, Any]) -> Paper:
    """Take the options of scaling alone out of `options`."""
    names, node = options.pop("links"), options.pop("node_link")
    links: list[Link | None] = [PRESETS.get(name) for name in names]
    latency, gigabytes = options.pop("latency_us"), options.pop("gigabytes")
    if (latency is None) != (gigabytes is None):
        raise UsageError("a link has both --latency-us and --gigabytes")
    if latency is not None:
        if latency < 0 or gigabytes <= 0:
            raise UsageError(f"no link has --latency-us {latency:g} and --gigabytes {gigabytes:g}")
        links.append(Link("given", latency / 1e6, gigabytes * 1e9))
    ranks_per_node = options.pop("ranks_per_node")
    if ranks_per_node < 1:
        raise UsageError(f"--ranks-per-node {ranks_per_node} must be at least 1")
    jitter = options.pop("jitter_ms")
    if jitter is not None and jitter < 0:
        raise UsageError(f"--jitter-ms {jitter:g} must not be negative")
    paper = Paper(
        works=_works(options),
        ranks_per_node=ranks_per_node,
        node=PRESETS.get(node),
        jitter_seconds=None if jitter is None else jitter / 1e3,
    )
    return replace(paper, links=tuple(links)) if links else paper


def _works(options: dict[str, Any]) -> tuple[Any, ...]:
    phases, megabytes = [options.pop(name) for name in _PHASES], options.pop("megabytes")
    if all(value is None for value in (*phases, megabytes)):
        return ()
    if any(value is None or value < 0 for value in (*phases, megabytes)) or not sum(phases):
        raise UsageError(
            "a step of your own has --forward-ms, --backward-ms, --optimizer-ms and --megabytes, "
            "none of them negative"
        )
    config = Config.from_environ(os.environ)
    seconds = (phases[0] / 1e3, phases[1] / 1e3, phases[2] / 1e3)
    nbytes = int(megabytes * 1e6)
    title = f"a step of your own, {megabytes:g} MB"
    bucket_bytes = config.bucket_bytes or DEFAULT_BUCKET_BYTES
    return (even_work(title, seconds, nbytes, bucket_bytes, config.first_bucket_bytes),)


def _run(benchmark: Callable[[Suite], None], options: dict[str, Any], **changes: Any) -> int:
    """Run a benchmark; `changes` are settings that the user gave, where they are not empty."""
    ranks = _ranks(options)
    settings = QUICK if options["quick"] else DEFAULT
    if (repeats := options["repeats"]) is not None:
        changes["repeats"] = repeats
    settings = replace(settings, **{name: value for name, value in changes.items() if value})
    out: Path | None = options["out"]
    if out is None:
        out = new_directory(RUNS, "bench")
    else:
        prepare_directory(out)
    hostfile, threads = options["hostfile"], options["threads"]
    suite = Suite(lambda: _launcher(hostfile, threads), ranks, settings, out)
    try:
        benchmark(suite)
        suite.finish()
    except KeyboardInterrupt:
        print("hvdtrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except HvdtrainError as error:
        if isinstance(error, UsageError):
            raise
        print(f"hvdtrain: {error}", file=sys.stderr)
        return EXIT_CRASH
    return 0


def _ranks(options: dict[str, Any]) -> int:
    promised = promised_world(os.environ)
    if promised is not None and promised.size > 1:
        raise UsageError(f"'bench' starts ranks itself: call it without {promised.launcher}")
    ranks, hostfile = options["ranks"], options["hostfile"]
    if hostfile is not None:
        read_file(hostfile)
        if ranks is None:
            raise UsageError("how many ranks on these hosts? Say -np N")
    if ranks is not None and ranks < 2:
        raise UsageError(f"-np {ranks} must be at least 2")
    for name in ("threads", "repeats"):
        if options[name] is not None and options[name] < 1:
            raise UsageError(f"--{name} {options[name]} must be at least 1")
    return ranks or largest_power_of_two(find_cores().usable)


def _launcher(hostfile: str | None, threads: int) -> Launcher:
    if importlib.util.find_spec("torch") is None:
        raise UsageError("torch is not installed: pip install 'hvdtrain[torch]'")
    return Launcher.find(hostfile, threads)
