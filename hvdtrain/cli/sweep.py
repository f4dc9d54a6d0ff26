"""`hvdtrain sweep`: train a recipe again and again, with options that Optuna proposes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.cli.train import (
    OF_CONFIGURATION,
    GroupedCommand,
    hold_stop_signal,
    read_options,
    with_train_options,
)
from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    from hvdtrain.train.sweep import Sweep


@click.command(cls=GroupedCommand)
@with_train_options
@click.option(
    "--search",
    multiple=True,
    metavar="NAME=VALUES",
    help="What differs: an option of train or set.ARGUMENT, and 0.001..0.1, 1e-4..1:log or 16,32.",
)
@click.option("--config", type=Path, metavar="FILE", help=OF_CONFIGURATION["--config"])
@click.option("--trials", type=click.IntRange(1), default=20, show_default=True, help="How many.")
@click.option("--storage", metavar="URL", help="Of Optuna's study.  [default: a file in --out]")
@click.option(
    "--ranks-per-trial",
    type=click.IntRange(1),
    metavar="N",
    help="Several trials at once, each on N of the ranks that `run` starts.  [default: all]",
)
@click.option("--start", default="", hidden=True)  # from `run`, the same for trials at once
@click.option("--prune/--no-prune", default=True, help="End trials that are worse than others.")
def command(**given: Any) -> None:
    """Train a recipe with the values that Optuna proposes, on all ranks or on some at once.

    sweep my_recipe.py --search lr=0.001..0.1:log --search set.width=32,64 --trials 20. All other
    options are those of train. The same command with --out goes on where it was stopped.
    """
    asked = _asked(given)
    if asked.ranks_per_trial is not None and not asked.start:
        raise UsageError(
            f"--ranks-per-trial {asked.ranks_per_trial}: start the ranks with `python -m hvdtrain "
            "run -np RANKS sweep ...`"
        )
    hold_stop_signal()
    from hvdtrain.train.sweep import run_sweep

    run_sweep(asked)


def read_sweep(words: Sequence[str]) -> Sweep:
    """Return the sweep that words ask for, without starting it; answer --help."""
    parent = click.get_current_context().parent
    return _asked(command.make_context("sweep", list(words), parent).params)


def _asked(given: dict[str, Any]) -> Sweep:
    from hvdtrain.train.sweep import Parameter, Sweep

    names = ("trials", "storage", "prune", "ranks_per_trial", "start")
    search, own = given.pop("search"), {name: given.pop(name) for name in names}
    return Sweep(read_options(given), [Parameter.parse(one) for one in search], **own)
