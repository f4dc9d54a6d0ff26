"""`hvdtrain bench`: compare hvdtrain with its peers, and predict how it scales."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
from hvdtrain_bench.analysis.link import PRESETS, Link
from hvdtrain_bench.analysis.machine import largest_power_of_two
from hvdtrain_bench.analysis.paper import Work, even_work
from hvdtrain_bench.harness.jobs import RankLauncher
from hvdtrain_bench.harness.settings import DEFAULT, FITTED, MODELS, QUICK, TASKS
from hvdtrain_bench.suite import Paper, Suite

from hvdtrain.check.machine import find_cores
from hvdtrain.config import DEFAULT_BUCKET_BYTES, Config
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED, HvdtrainError, UsageError
from hvdtrain.launch.hosts.formats import read_file
from hvdtrain.train.options import BACKENDS, RUNS
from hvdtrain.train.records.files import new_directory, prepare_directory
from hvdtrain.world import promised_world

__all__ = ["command"]

_HERE = "here"
_LINKS = click.Choice([_HERE, *PRESETS])
_LOSS_HELP = "Instead of timing steps, train this task in ten turns, once for each repeat, as seed."
_MODELS_HELP = "Instead of all; more than one may be given."


@dataclass(frozen=True)
class _Options:
    """The options of every benchmark; None where the user has not given one."""

    ranks: int | None
    hostfile: str | None
    threads: int
    repeats: int | None
    quick: bool
    out: Path | None


class _DefaultsToAll(click.Group):
    """A group that runs `all` if no benchmark is named."""

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
    """Add the options of every benchmark to a command, which gets them as its first argument."""

    # What is in `given` is between click and the command.
    @wraps(function)
    def measure(
        ranks: int | None,
        hostfile: str | None,
        threads: int,
        repeats: int | None,
        quick: bool,
        out: Path | None,
        **given: Any,
    ) -> int:
        return function(_Options(ranks, hostfile, threads, repeats, quick, out), **given)

    command: Callable[..., int] = measure
    for option in (
        click.option("--out", type=Path, metavar="DIR", help="For JSON and pictures."),
        click.option("--repeats", type=int, help="Turns of each; 8 at least tell from noise."),
        click.option("--threads", default=1, show_default=True, help="Of torch, per rank."),
        click.option("-hostfile", "--hostfile", help="Hosts in the MPI's own grammar."),
        click.option("ranks", "-np", "-n", "--num-ranks", type=int, help="The most ranks."),
        click.option("--quick", is_flag=True, help="Few sizes, one small model."),
    ):
        command = option(command)
    return command


@command.command("all")
@_measuring
def _all(options: _Options) -> int:
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
def _collectives(options: _Options, sizes: tuple[int, ...]) -> int:
    """Sum tensors: by size, many at once, beside a busy thread."""
    if any(size < 4 or size % 4 for size in sizes):
        raise UsageError(f"--bytes {min(sizes)}: give positive multiples of 4, a float32's size")
    return _run(Suite.collectives, options, sizes_bytes=sizes)


@command.command("steps")
@_measuring
@click.option("models", "--model", multiple=True, type=click.Choice(MODELS), help=_MODELS_HELP)
def _steps(options: _Options, models: tuple[str, ...]) -> int:
    """Train four models on 2, 4, ... ranks."""
    return _run(Suite.steps, options, models=models)


@command.command("tensorflow")
@_measuring
def _tensorflow(options: _Options) -> int:
    """Train an MLP with TensorFlow, Horovod and tf.distribute."""
    return _run(Suite.tensorflow, options)


@command.command("keras")
@_measuring
@click.option(
    "backends", "--backend", multiple=True, type=click.Choice(BACKENDS), help=_MODELS_HELP
)
@click.option("models", "--model", multiple=True, type=click.Choice(FITTED), help=_MODELS_HELP)
def _keras(options: _Options, backends: tuple[str, ...], models: tuple[str, ...]) -> int:
    """Fit two models with Keras, with and without communication."""
    return _run(lambda suite: suite.keras(backends or BACKENDS), options, models=models)


@command.command("checkpoint")
@_measuring
@click.option("models", "--model", multiple=True, type=click.Choice(MODELS), help=_MODELS_HELP)
def _checkpoint(options: _Options, models: tuple[str, ...]) -> int:
    """Time steps while a checkpoint is written."""
    chosen = models or (() if options.quick else ("mlp",))
    return _run(Suite.checkpoint, options, models=chosen)


@command.command("exchange")
@_measuring
@click.option("models", "--model", multiple=True, type=click.Choice(MODELS), help=_MODELS_HELP)
@click.option(
    "exchanges",
    "--exchange",
    multiple=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="Instead of the usual; see `hvdtrain exchanges`.",
)
@click.option("--steps", default=8, show_default=True, help="Of a turn: a multiple of each period.")
@click.option("tasks", "--loss", multiple=True, type=click.Choice(TASKS), help=_LOSS_HELP)
def _exchange(
    options: _Options,
    models: tuple[str, ...],
    exchanges: tuple[str, ...],
    steps: int,
    tasks: tuple[str, ...],
) -> int:
    """Compare other ways to exchange gradients or weights with the average.

    On hosts that share no memory (-hostfile): within a node nothing is compressed. The bytes are
    those that a host's network cards have counted.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps} must be at least 1")
    for text in exchanges:
        try:
            make_exchange(text)
        except ValueError as error:
            raise UsageError(f"--exchange: {error}") from None
    changes: dict[str, int | Sequence[str]] = {"exchanges": exchanges, "steps_per_turn": steps}
    if tasks:
        return _run(Suite.exchange_losses, options, tasks=tasks, **changes)
    chosen = models or (() if options.quick else ("transformer",))
    return _run(Suite.exchange, options, models=chosen, **changes)


@command.command("loop")
@_measuring
def _loop(options: _Options) -> int:
    """Time the loop of `train` beside one written by hand."""
    return _run(Suite.loop, options)


@command.command("idle")
@_measuring
def _idle(options: _Options) -> int:
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
def _scaling(
    options: _Options,
    models: tuple[str, ...],
    links: tuple[str, ...],
    latency_us: float | None,
    gigabytes: float | None,
    ranks_per_node: int,
    node_link: str,
    jitter_ms: float | None,
    forward_ms: float | None,
    backward_ms: float | None,
    optimizer_ms: float | None,
    megabytes: float | None,
) -> int:
    """Predict steps on 1 to 4,096 ranks on paper."""
    named: list[Link | None] = [PRESETS.get(name) for name in links]
    own = _own_link(latency_us, gigabytes)
    all_links = [*named, *([own] if own is not None else [])]
    if ranks_per_node < 1:
        raise UsageError(f"--ranks-per-node {ranks_per_node} must be at least 1")
    if jitter_ms is not None and jitter_ms < 0:
        raise UsageError(f"--jitter-ms {jitter_ms:g} must not be negative")
    paper = Paper(
        works=_own_work((forward_ms, backward_ms, optimizer_ms), megabytes),
        ranks_per_node=ranks_per_node,
        node=PRESETS.get(node_link),
        jitter_seconds=None if jitter_ms is None else jitter_ms / 1e3,
    )
    paper = replace(paper, links=tuple(all_links)) if all_links else paper
    return _run(lambda suite: suite.scaling(paper), options, models=models)


def _own_link(latency_us: float | None, gigabytes: float | None) -> Link | None:
    """Return the link that the user describes, or None."""
    if latency_us is None and gigabytes is None:
        return None
    if latency_us is None or gigabytes is None:
        raise UsageError("a link needs both --latency-us and --gigabytes")
    if latency_us < 0 or gigabytes <= 0:
        raise UsageError(
            f"--latency-us must be 0 or more and --gigabytes positive, got {latency_us:g} "
            f"and {gigabytes:g}"
        )
    return Link("given", latency_us / 1e6, gigabytes * 1e9)


def _own_work(phases_ms: Sequence[float | None], megabytes: float | None) -> tuple[Work, ...]:
    """Return the step that the user describes, if any."""
    figures = (*phases_ms, megabytes)
    if all(value is None for value in figures):
        return ()
    known = [value for value in figures if value is not None and value >= 0]
    if len(known) < len(figures) or not sum(known[:-1]):
        raise UsageError(
            "a step of your own needs --forward-ms, --backward-ms, --optimizer-ms and --megabytes, "
            "none of them negative"
        )
    forward_ms, backward_ms, optimizer_ms, size = known
    config = Config.from_environ(os.environ)
    seconds = (forward_ms / 1e3, backward_ms / 1e3, optimizer_ms / 1e3)
    title = f"a step of your own, {size:g} MB"
    bucket_bytes = config.bucket_bytes or DEFAULT_BUCKET_BYTES
    return (even_work(title, seconds, int(size * 1e6), bucket_bytes, config.first_bucket_bytes),)


def _run(
    benchmark: Callable[[Suite], None],
    options: _Options,
    **changes: int | Sequence[int | str],
) -> int:
    """Run a benchmark; `changes` are settings that replace the usual ones if not empty."""
    ranks = _ranks(options)
    settings = QUICK if options.quick else DEFAULT
    if options.repeats is not None:
        settings = replace(settings, repeats=options.repeats)
    given: dict[str, Any] = {name: value for name, value in changes.items() if value}
    settings = replace(settings, **given)
    out = options.out
    if out is None:
        out = new_directory(RUNS, "bench")
    else:
        prepare_directory(out)
    suite = Suite(lambda: _launcher(options.hostfile, options.threads), ranks, settings, out)
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


def _ranks(options: _Options) -> int:
    promised = promised_world(os.environ)
    if promised is not None and promised.size > 1:
        raise UsageError(f"'bench' starts ranks itself: call it without {promised.launcher}")
    ranks, hostfile = options.ranks, options.hostfile
    if hostfile is not None:
        read_file(hostfile)
        if ranks is None:
            raise UsageError("how many ranks on these hosts? Pass -np N")
    if ranks is not None and ranks < 2:
        raise UsageError(f"-np {ranks} must be at least 2")
    for name, count in (("threads", options.threads), ("repeats", options.repeats)):
        if count is not None and count < 1:
            raise UsageError(f"--{name} {count} must be at least 1")
    return ranks or largest_power_of_two(find_cores().usable)


def _launcher(hostfile: str | None, threads: int) -> RankLauncher:
    if importlib.util.find_spec("torch") is None:
        raise UsageError("torch is not installed: pip install 'hvdtrain[torch]'")
    return RankLauncher.find(hostfile, threads)
