"""The benchmarks as subcommands of `hvdtrain bench`, and their options."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hvdtrain.check.checks import find_cores
from hvdtrain.config import DEFAULT_BUCKET_BYTES, Config
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED, HvdtrainError, UsageError
from hvdtrain.launch.hosts.formats import read_file
from hvdtrain.train.options import BACKENDS
from hvdtrain.world import refuse_on_ranks
from hvdtrain_bench.harness.jobs import RankLauncher
from hvdtrain_bench.harness.results import (
    DEFAULT,
    FITTED,
    MODELS,
    OPTIMIZERS,
    QUICK,
    SHARDED,
    TASKS,
    period_of,
    results_folder,
)
from hvdtrain_bench.harness.text import console, table_of, time_text
from hvdtrain_bench.many.measure import ENDS
from hvdtrain_bench.scaling.paper import PRESETS, Cluster, Link, Work, even_work
from hvdtrain_bench.scaling.simulation import SCENARIOS, Found
from hvdtrain_bench.suite import Paper, Suite

ALL_HELP = "Instead of all; more than one may be given."

Command = Callable[..., int]


def benchmark_options(command: Command) -> Command:
    """Add the options of every benchmark to a command, which hands them to run_suite()."""
    for option in (
        click.option("--out", type=Path, metavar="DIR", help="Directory for JSON and plots."),
        click.option(
            "--repeats",
            type=int,
            help="Turns of each; 8 or more to detect differences.",
        ),
        click.option("--threads", default=1, show_default=True, help="Threads of torch per rank."),
        click.option("-hostfile", "--hostfile", help="Hostfile in the format of the MPI."),
        click.option("ranks", "-np", "-n", "--num-ranks", type=int, help="Most ranks to use."),
        click.option("--quick", is_flag=True, help="Few sizes, one small model."),
    ):
        command = option(command)
    return command


def models_option(known: Sequence[str] = MODELS) -> Callable[[Command], Command]:
    return click.option("models", "--model", multiple=True, type=click.Choice(known), help=ALL_HELP)


def exchanges_option(text: str) -> Callable[[Command], Command]:
    name = "NAME[:KEY=VALUE,...]"
    return click.option("exchanges", "--exchange", multiple=True, metavar=name, help=text)


def require_exchanges(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            make_exchange(text)
        except ValueError as error:
            raise UsageError(f"--exchange: {error}") from None


def run_suite(
    benchmark: Callable[[Suite], object],
    *,
    ranks: int | None,
    hostfile: str | None,
    threads: int,
    repeats: int | None,
    quick: bool,
    out: Path | None,
    needs_torch: bool = True,
    **changes: int | Sequence[int | str] | None,
) -> int:
    refuse_on_ranks("'bench'")
    if hostfile is not None:
        read_file(hostfile)
        if ranks is None:
            raise UsageError("how many ranks on these hosts? Pass -np N")
    if ranks is not None and ranks < 2:
        raise UsageError(f"-np {ranks} must be at least 2")
    for name, count in (("threads", threads), ("repeats", repeats)):
        if count is not None and count < 1:
            raise UsageError(f"--{name} {count} must be at least 1")
    # By default the largest power of two up to the number of cores.
    ranks = ranks or 1 << max(1, int(find_cores().usable).bit_length() - 1)
    given: dict[str, Any] = {
        name: value
        for name, value in {**changes, "repeats": repeats}.items()
        if value is not None and value != ()
    }
    settings = replace(QUICK if quick else DEFAULT, **given)
    folder = results_folder(out, "bench")
    suite = Suite(lambda: _launcher(hostfile, threads, needs_torch), ranks, settings, folder)
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


def _launcher(hostfile: str | None, threads: int, needs_torch: bool) -> RankLauncher:
    if needs_torch and importlib.util.find_spec("torch") is None:
        raise UsageError("torch is not installed: pip install 'hvdtrain[torch]'")
    return RankLauncher.find(hostfile, threads)


_HERE = "here"
_ALIKE, _PERIODIC = ("half", "nbit", "powersgd", "topk"), ("local",)
_BEGINNINGS = ("warmup", "distributed_after")
_LINKS = click.Choice([_HERE, *PRESETS])


@click.command("scaling")
@benchmark_options
@models_option()
@click.option("links", "--link", multiple=True, type=_LINKS, help="Instead of all; see --model.")
@exchanges_option("Also with this exchange; see `hvdtrain exchanges`.")
@click.option("--sharded", is_flag=True, help="Also with ranks that share the optimizer's work.")
@click.option("--trees", is_flag=True, help="On links that are not measured, reduce as NCCL.")
@click.option("--latency-us", type=float, help="Latency of a link of your own, in microseconds.")
@click.option("--gigabytes", type=float, help="Bandwidth of this link, in GB per second.")
@click.option("--ranks-per-node", default=1, show_default=True, help="Ranks per network card.")
@click.option("--node-link", type=_LINKS, default=_HERE, help="Link within a node.")
@click.option("--jitter-ms", type=float, help="Variation between ranks.  [default: measured]")
@click.option("--forward-ms", type=float, help="Forward pass of a step of your own, and ...")
@click.option("--backward-ms", type=float, help="... its backward pass, and ...")
@click.option("--optimizer-ms", type=float, help="... its optimizer, and ...")
@click.option("--megabytes", type=float, help="... its gradients.")
def scaling(
    models: tuple[str, ...],
    links: tuple[str, ...],
    exchanges: tuple[str, ...],
    sharded: bool,
    trees: bool,
    latency_us: float | None,
    gigabytes: float | None,
    ranks_per_node: int,
    node_link: str,
    jitter_ms: float | None,
    forward_ms: float | None,
    backward_ms: float | None,
    optimizer_ms: float | None,
    megabytes: float | None,
    **common: Any,
) -> int:
    """Predict steps on 1 to 4,096 ranks on paper, in intervals that contain 90 %.

    Latency, bandwidth, phases of a step and differences between ranks are measured, with their
    spread. Steps on 2, 4, ... ranks up to -np are measured, too, and compared with predictions.
    """
    named: list[Link | None] = [PRESETS.get(name) for name in links]
    own = _own_link(latency_us, gigabytes)
    all_links = [*named, *([own] if own is not None else [])] or list(Paper.links)
    _require_predicted(exchanges)
    if ranks_per_node < 1:
        raise UsageError(f"--ranks-per-node {ranks_per_node} must be at least 1")
    if jitter_ms is not None and jitter_ms < 0:
        raise UsageError(f"--jitter-ms {jitter_ms:g} must not be negative")
    paper = Paper(
        links=tuple(_with_trees(link, trees) for link in all_links),
        schemes=(*dict.fromkeys(exchanges), *([SHARDED] if sharded else [])),
        works=_own_work((forward_ms, backward_ms, optimizer_ms), megabytes),
        ranks_per_node=ranks_per_node,
        node=_with_trees(PRESETS.get(node_link), trees),
        jitter_seconds=None if jitter_ms is None else jitter_ms / 1e3,
    )
    return run_suite(lambda suite: suite.scaling(paper), **common, models=models)


def _require_predicted(exchanges: Sequence[str]) -> None:
    """Check that exchanges are of those whose steps are alike, or come in periods."""
    require_exchanges(exchanges)
    for text in exchanges:
        name, _, options = text.partition(":")
        periodic = name in _PERIODIC and period_of(text) > 1
        if not (name in _ALIKE or periodic) or any(word in options for word in _BEGINNINGS):
            raise UsageError(
                f"--exchange {text}: predicted are {', '.join(_ALIKE)} and local with steps of at "
                "least 2, without averages before them"
            )


def _with_trees(link: Link | None, trees: bool) -> Link | None:
    return link and replace(link, trees=link.trees or trees)


def _own_link(latency_us: float | None, gigabytes: float | None) -> Link | None:
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


_PARTS = ("kills", "steps")
_LOSS_HELP = "Instead of timing steps, train this task in ten turns, once for each repeat, as seed."


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
    called so. It starts ranks itself: about 13 minutes for all on two cores, with --quick one.
    """


@command.command("all")
@benchmark_options
def _all(**common: Any) -> int:
    """Run collectives, steps, idle and scaling."""

    def run(suite: Suite) -> None:
        suite.collectives()
        suite.steps()
        suite.run("idle")
        suite.scaling(Paper())

    return run_suite(run, **common)


@command.command("collectives")
@benchmark_options
@click.option("sizes", "--bytes", type=int, multiple=True, help="Sizes, instead of the usual.")
def _collectives(sizes: tuple[int, ...], **common: Any) -> int:
    """Sum tensors: by size, many at once, next to a busy thread."""
    if any(size < 4 or size % 4 for size in sizes):
        raise UsageError(f"--bytes {min(sizes)}: give positive multiples of 4, a float32's size")
    return run_suite(Suite.collectives, **common, sizes_bytes=sizes)


@command.command("steps")
@benchmark_options
@models_option()
@click.option(
    "optimizers",
    "--optimizer",
    multiple=True,
    type=click.Choice(OPTIMIZERS),
    help="Instead of SGD with momentum; more than one may be given.",
)
@click.option("--apart", is_flag=True, help="Then each contender again in processes of its own.")
def _steps(models: tuple[str, ...], optimizers: tuple[str, ...], apart: bool, **common: Any) -> int:
    """Train five models on 2, 4, ... ranks."""

    def run(suite: Suite) -> None:
        suite.steps(apart)

    return run_suite(run, **common, models=models, optimizers=optimizers)


@command.command("tensorflow")
@benchmark_options
def _tensorflow(**common: Any) -> int:
    """Train an MLP with TensorFlow, Horovod and tf.distribute."""

    kinds = ("tensorflow", "tensorflow-strategy")
    return run_suite(lambda suite: [suite.run(kind) for kind in kinds], **common)


@command.command("keras")
@benchmark_options
@click.option("backends", "--backend", multiple=True, type=click.Choice(BACKENDS), help=ALL_HELP)
@models_option(FITTED)
def _keras(backends: tuple[str, ...], models: tuple[str, ...], **common: Any) -> int:
    """Fit two models with Keras, with and without communication."""

    kinds = [f"keras-{backend}" for backend in backends or BACKENDS]
    return run_suite(lambda suite: [suite.run(kind) for kind in kinds], **common, models=models)


@command.command("checkpoint")
@benchmark_options
@models_option()
def _checkpoint(models: tuple[str, ...], **common: Any) -> int:
    """Time steps while a checkpoint is being written."""
    chosen = models or (() if common["quick"] else ("mlp",))
    return run_suite(lambda suite: suite.run("checkpoint"), **common, models=chosen)


@command.command("exchange")
@benchmark_options
@models_option()
@exchanges_option("Instead of the usual; see `hvdtrain exchanges`.")
@click.option(
    "--steps", default=8, show_default=True, help="Steps of a turn, rounded up to whole periods."
)
@click.option("tasks", "--loss", multiple=True, type=click.Choice(TASKS), help=_LOSS_HELP)
def _exchange(
    models: tuple[str, ...],
    exchanges: tuple[str, ...],
    steps: int,
    tasks: tuple[str, ...],
    **common: Any,
) -> int:
    """Compare other ways to exchange gradients or weights with the average.

    On hosts that share no memory (-hostfile): within a node nothing is compressed. The bytes are
    those that a host's network cards have counted.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps} must be at least 1")
    require_exchanges(exchanges)
    changes: dict[str, Any] = {"exchanges": exchanges, "steps_per_turn": steps}
    if tasks:
        return run_suite(Suite.exchange_losses, **common, tasks=tasks, **changes)
    chosen = models or (() if common["quick"] else ("transformer",))
    return run_suite(lambda suite: suite.run("exchange"), **common, models=chosen, **changes)


@command.command("elastic")
@benchmark_options
@click.option("--kills", type=click.IntRange(1), help="Kills of hvdtrain.  [default: 20]")
@click.option(
    "--peer-kills",
    type=click.IntRange(0),
    help="Kills of Horovod and of torchrun, each of which takes a minute or less.  [default: 5]",
)
@click.option("parts", "--part", multiple=True, type=click.Choice(_PARTS), help=ALL_HELP)
@models_option()
def _elastic(
    kills: int | None,
    peer_kills: int | None,
    parts: tuple[str, ...],
    models: tuple[str, ...],
    **common: Any,
) -> int:
    """Measure what a killed rank costs, and steps of a job that survives one.

    A process is killed in each of many jobs of three ranks, of hvdtrain, Horovod and torchrun.
    """
    chosen = models or (() if common["quick"] else ("mlp",))

    def run(suite: Suite) -> None:
        for part in parts or _PARTS:
            {"kills": suite.kills, "steps": suite.elastic_steps}[part]()

    return run_suite(run, **common, models=chosen, kills=kills, peer_kills=peer_kills)


@command.command("ranks")
@benchmark_options
@click.option("ends", "--end", multiple=True, type=click.Choice(ENDS), help=ALL_HELP)
def _many(ends: tuple[str, ...], **common: Any) -> int:
    """Measure how a start, memory, a stall and a loss grow from 2 ranks to -np.

    The ranks load no framework. Many more than there are cores may be started: CPU time counts.
    """
    return run_suite(lambda suite: suite.many(ends or ENDS), **common, needs_torch=False)


@command.command("loop")
@benchmark_options
def _loop(**common: Any) -> int:
    """Compare the loop of `train` with a handwritten one."""
    return run_suite(Suite.loop, **common)


@command.command("idle")
@benchmark_options
def _idle(**common: Any) -> int:
    """Measure the CPU usage of waiting ranks."""
    return run_suite(lambda suite: suite.run("idle"), **common)


command.add_command(scaling)


_NODE = Link("shared memory", 0.5e-6, 10e9)
_SIMULATED_RANKS = (10, 100, 1000, 10000)
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


@command.command("simulate")
@click.option("sizes", "-np", "-n", "--num-ranks", type=click.IntRange(3), multiple=True)
@click.option("--link", type=click.Choice(list(PRESETS)), default="hdr", show_default=True)
@click.option("--ranks-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, help="Of the jitter.")
def _simulate(sizes: Sequence[int], link: str, ranks_per_node: int, seed: int) -> None:
    """Simulate what ranks agree on, with hvdtrain's own code, at 10 to 10,000 ranks.

    For each: votes, bytes that each rank receives in them and in reports and tensors, and the time
    from when the last rank begins to when the last one has ended.
    """
    cluster = Cluster(PRESETS[link], _NODE, ranks_per_node)
    chosen = sizes or _SIMULATED_RANKS
    title = f"{PRESETS[link].name}, {ranks_per_node} ranks per node"
    rows = (
        (name, *(_cell(scenario(cluster, size, seed)) for size in chosen))
        for name, scenario in SCENARIOS.items()
    )
    console().print(table_of(title, ["ranks", *(f"{size:,}" for size in chosen)], rows))


def _cell(found: Found) -> str:
    unit, size = next(one for one in _UNITS if found.nbytes >= one[1])
    votes = f"{found.votes} vote{'s' * (found.votes != 1)}"
    return f"{votes}\n{found.nbytes / size:.3g} {unit}\n{time_text(found.seconds)}"
