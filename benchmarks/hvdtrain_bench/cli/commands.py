"""The benchmarks as subcommands of `hvdtrain bench`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hvdtrain.errors import UsageError
from hvdtrain.train.options import BACKENDS
from hvdtrain_bench.cli.options import (
    ALL_HELP,
    BenchOptions,
    benchmark_options,
    exchanges_option,
    models_option,
    require_exchanges,
    run_suite,
)
from hvdtrain_bench.cli.scaling import scaling
from hvdtrain_bench.harness.settings import FITTED, OPTIMIZERS, TASKS
from hvdtrain_bench.suite import Paper, Suite

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
def _all(options: BenchOptions) -> int:
    """Run collectives, steps, idle and scaling."""

    def run(suite: Suite) -> None:
        suite.collectives()
        suite.steps()
        suite.run("idle")
        suite.scaling(Paper())

    return run_suite(run, options)


@command.command("collectives")
@benchmark_options
@click.option("sizes", "--bytes", type=int, multiple=True, help="Sizes, instead of the usual.")
def _collectives(options: BenchOptions, sizes: tuple[int, ...]) -> int:
    """Sum tensors: by size, many at once, next to a busy thread."""
    if any(size < 4 or size % 4 for size in sizes):
        raise UsageError(f"--bytes {min(sizes)}: give positive multiples of 4, a float32's size")
    return run_suite(Suite.collectives, options, sizes_bytes=sizes)


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
def _steps(options: BenchOptions, models: tuple[str, ...], optimizers: tuple[str, ...]) -> int:
    """Train five models on 2, 4, ... ranks."""
    return run_suite(Suite.steps, options, models=models, optimizers=optimizers)


@command.command("tensorflow")
@benchmark_options
def _tensorflow(options: BenchOptions) -> int:
    """Train an MLP with TensorFlow, Horovod and tf.distribute."""

    kinds = ("tensorflow", "tensorflow-strategy")
    return run_suite(lambda suite: [suite.run(kind) for kind in kinds], options)


@command.command("keras")
@benchmark_options
@click.option("backends", "--backend", multiple=True, type=click.Choice(BACKENDS), help=ALL_HELP)
@models_option(FITTED)
def _keras(options: BenchOptions, backends: tuple[str, ...], models: tuple[str, ...]) -> int:
    """Fit two models with Keras, with and without communication."""

    kinds = [f"keras-{backend}" for backend in backends or BACKENDS]
    return run_suite(lambda suite: [suite.run(kind) for kind in kinds], options, models=models)


@command.command("checkpoint")
@benchmark_options
@models_option()
def _checkpoint(options: BenchOptions, models: tuple[str, ...]) -> int:
    """Time steps while a checkpoint is being written."""
    chosen = models or (() if options.quick else ("mlp",))
    return run_suite(lambda suite: suite.run("checkpoint"), options, models=chosen)


@command.command("exchange")
@benchmark_options
@models_option()
@exchanges_option("Instead of the usual; see `hvdtrain exchanges`.")
@click.option(
    "--steps", default=8, show_default=True, help="Steps of a turn, rounded up to whole periods."
)
@click.option("tasks", "--loss", multiple=True, type=click.Choice(TASKS), help=_LOSS_HELP)
def _exchange(
    options: BenchOptions,
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
    require_exchanges(exchanges)
    changes: dict[str, int | Sequence[str]] = {"exchanges": exchanges, "steps_per_turn": steps}
    if tasks:
        return run_suite(Suite.exchange_losses, options, tasks=tasks, **changes)
    chosen = models or (() if options.quick else ("transformer",))
    return run_suite(lambda suite: suite.run("exchange"), options, models=chosen, **changes)


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
    options: BenchOptions,
    kills: int | None,
    peer_kills: int | None,
    parts: tuple[str, ...],
    models: tuple[str, ...],
) -> int:
    """Measure what a killed rank costs, and steps of a job that survives one.

    A process is killed in each of many jobs of three ranks, of hvdtrain, Horovod and torchrun.
    """
    chosen = models or (() if options.quick else ("mlp",))

    def run(suite: Suite) -> None:
        for part in parts or _PARTS:
            {"kills": suite.kills, "steps": suite.elastic_steps}[part]()

    return run_suite(run, options, models=chosen, kills=kills, peer_kills=peer_kills)


@command.command("loop")
@benchmark_options
def _loop(options: BenchOptions) -> int:
    """Compare the loop of `train` with a handwritten one."""
    return run_suite(Suite.loop, options)


@command.command("idle")
@benchmark_options
def _idle(options: BenchOptions) -> int:
    """Measure the CPU usage of waiting ranks."""
    return run_suite(lambda suite: suite.run("idle"), options)


command.add_command(scaling)
