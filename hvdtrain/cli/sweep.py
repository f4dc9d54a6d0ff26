"""`hvdtrain sweep`: train a recipe again and again, with options that Optuna proposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.train import (
    OF_CONFIGURATION,
    GroupedCommand,
    hold_stop_signal,
    read_options,
    with_train_options,
)


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
@click.option("--prune/--no-prune", default=True, help="End trials that are worse than others.")
def command(
    search: tuple[str, ...], trials: int, storage: str | None, prune: bool, **given: Any
) -> None:
    """Train a recipe on all ranks with the values that Optuna proposes, one trial after the other.

    sweep my_recipe.py --search lr=0.001..0.1:log --search set.width=32,64 --trials 20. All other
    options are those of train. The same command with --out goes on where it was stopped.
    """
    asked = read_options(given)
    hold_stop_signal()
    from hvdtrain.train.sweep import Parameter, Sweep, run_sweep

    run_sweep(Sweep(asked, [Parameter.parse(one) for one in search], trials, storage, prune))
