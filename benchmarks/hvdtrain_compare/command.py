"""`hvdtrain compare`: the same recipe under several strategies of parallel training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.train import read_options
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED, UsageError
from hvdtrain.train.options import BACKENDS, DTYPES, FRAMEWORKS
from hvdtrain.world import refuse_on_ranks

_DEFAULTS = {"torch": ("hvdtrain,ddp",), "keras": ("hvdtrain,mirrored",)}
_PYTHON_HELP = "Interpreter of another environment for a strategy; may be given several times."


@click.command()
@click.argument("recipe", required=False, metavar="[NAME|FILE.py[:FUNCTION]]")
@click.option(
    "names",
    "--with",
    multiple=True,
    metavar="NAME,...",
    help="Strategies; the others are compared with the first.  [default: hvdtrain,ddp; with Keras "
    "hvdtrain,mirrored]",
)
@click.option("ranks", "-np", "-n", "--num-ranks", type=click.IntRange(1), default=2)
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Turns.")
@click.option("--out", type=Path, metavar="DIR", help="Directory for compare.json and .html.")
@click.option(
    "--check-steps",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Steps after which weights are compared.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest time of a turn.",
)
@click.option("pythons", "--python", multiple=True, metavar="NAME=PATH", help=_PYTHON_HELP)
@click.option("--set", multiple=True, metavar="NAME=VALUE", help="Argument of the recipe.")
@click.option("--data-dir", type=Path, metavar="DIR", help="Directory of the recipe's data.")
@click.option("--framework", type=click.Choice(FRAMEWORKS), help="Of the recipe.")
@click.option("--backend", type=click.Choice(BACKENDS), help="Of Keras.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights; default: float32.")
@click.option("--batch-size", type=int, help="Samples per rank and step.")
@click.option("--optimizer", metavar="NAME", help="As for train.")
@click.option("--lr", type=float, help="Learning rate for one rank.")
@click.option("--seed", type=int, help="Seed of weights and order.")
def command(
    names: tuple[str, ...],
    ranks: int,
    repeats: int,
    out: Path | None,
    check_steps: int,
    time_limit: float,
    pythons: tuple[str, ...],
    **given: Any,
) -> int:
    """Train one recipe under several strategies, in turns, and compare them.

    Each strategy trains the same model on the same batches in ranks of its own, on the CPU of this
    host: how long steps take, whether weights are those of one process, which samples are really
    used. One process with the whole batch is always included.
    """
    from hvdtrain_compare.contenders import parse_contenders
    from hvdtrain_compare.session import Request, compare

    refuse_on_ranks("'compare'")
    options = read_options({name: value for name, value in given.items() if value != ()})
    request = Request(
        contenders=parse_contenders(
            names or _DEFAULTS[options.framework], dict(map(_python, pythons)), options.framework
        ),
        options=options.with_absolute_paths(),
        ranks=ranks,
        repeats=repeats,
        check_steps=check_steps,
        limit_seconds=time_limit,
        out=out,
    )
    try:
        return 0 if compare(request) else EXIT_CRASH
    except KeyboardInterrupt:
        print("hvdtrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _python(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not name or not os.access(path, os.X_OK):
        raise UsageError(f"--python {text!r}: write NAME=PATH, with the path of an interpreter")
    return name, os.path.abspath(path)
