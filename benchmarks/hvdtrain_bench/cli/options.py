"""The options of every benchmark, and running one with them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click

from hvdtrain.check.checks import find_cores
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED, HvdtrainError, UsageError
from hvdtrain.launch.hosts.formats import read_file
from hvdtrain.world import refuse_on_ranks
from hvdtrain_bench.analysis.machine import largest_power_of_two
from hvdtrain_bench.harness.jobs import RankLauncher
from hvdtrain_bench.harness.results import results_folder
from hvdtrain_bench.harness.settings import DEFAULT, MODELS, QUICK
from hvdtrain_bench.suite import Suite

ALL_HELP = "Instead of all; more than one may be given."

Command = Callable[..., int]


@dataclass(frozen=True)
class BenchOptions:
    """The options of every benchmark; None if the user has not given one."""

    ranks: int | None
    hostfile: str | None
    threads: int
    repeats: int | None
    quick: bool
    out: Path | None


def benchmark_options(function: Command) -> Command:
    """Add the options of every benchmark to a command, which gets them as its first argument."""
    names = [field.name for field in fields(BenchOptions)]

    @wraps(function)
    def measure(**given: Any) -> int:
        common = BenchOptions(**{name: given.pop(name) for name in names})
        return function(common, **given)

    command: Command = measure
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
    """Return the option that names models."""
    return click.option("models", "--model", multiple=True, type=click.Choice(known), help=ALL_HELP)


def exchanges_option(text: str) -> Callable[[Command], Command]:
    """Return the option that names exchanges."""
    name = "NAME[:KEY=VALUE,...]"
    return click.option("exchanges", "--exchange", multiple=True, metavar=name, help=text)


def require_exchanges(texts: Sequence[str]) -> None:
    """Check exchanges of the command line."""
    for text in texts:
        try:
            make_exchange(text)
        except ValueError as error:
            raise UsageError(f"--exchange: {error}") from None


def run_suite(
    benchmark: Callable[[Suite], object],
    options: BenchOptions,
    **changes: int | Sequence[int | str] | None,
) -> int:
    """Run a benchmark and return the exit code."""
    ranks = _ranks(options)
    settings = QUICK if options.quick else DEFAULT
    if options.repeats is not None:
        settings = replace(settings, repeats=options.repeats)
    given: dict[str, Any] = {
        name: value for name, value in changes.items() if value is not None and value != ()
    }
    settings = replace(settings, **given)
    out = results_folder(options.out, "bench")
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


def _ranks(options: BenchOptions) -> int:
    refuse_on_ranks("'bench'")
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
