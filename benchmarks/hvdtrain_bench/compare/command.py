"""`hvdtrain compare`: the same recipe under several strategies of parallel training."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain import __version__
from hvdtrain.check.checks import find_cores
from hvdtrain.cli.train import read_options
from hvdtrain.errors import EXIT_CRASH, EXIT_INTERRUPTED, UsageError
from hvdtrain.train.options import BACKENDS, DTYPES, FRAMEWORKS
from hvdtrain.train.records import json_text
from hvdtrain.world import refuse_on_ranks
from hvdtrain_bench.harness.results import results_folder

if TYPE_CHECKING:
    from hvdtrain_bench.compare.strategies import StrategyContender
    from hvdtrain_bench.compare.turns import CommonSettings

_DEFAULTS = {"torch": ("hvdtrain,ddp",), "keras": ("hvdtrain,mirrored",)}
# Options that say what is trained; the others have no meaning for other libraries.
_COMPARED = (
    *("recipe", "set", "data_dir", "framework", "backend", "dtype"),
    *("epochs", "batch_size", "optimizer", "lr", "seed"),
)
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
    from hvdtrain_report.document import require_jinja

    from hvdtrain_bench.compare.strategies import parse_contenders
    from hvdtrain_bench.compare.turns import CommonSettings

    refuse_on_ranks("'compare'")
    options = read_options({name: value for name, value in given.items() if value != ()})
    own = dict(map(_python, pythons))
    contenders = parse_contenders(names or _DEFAULTS[options.framework], own, options.framework)
    require_jinja("compare")
    folder = results_folder(out, "compare")
    settings = CommonSettings(
        options.with_absolute_paths(), ranks, repeats, check_steps, time_limit, folder
    )
    try:
        return 0 if _compare(contenders, settings) else EXIT_CRASH
    except KeyboardInterrupt:
        print("hvdtrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _compare(contenders: Sequence[StrategyContender], settings: CommonSettings) -> bool:
    """Run all contenders, and print and write what they did; return whether one of them ran."""
    from hvdtrain_bench.compare.page import print_tables, write_page
    from hvdtrain_bench.compare.rows import make_rows
    from hvdtrain_bench.compare.strategies import reference
    from hvdtrain_bench.compare.turns import run_turns

    options = settings.options
    outcomes = run_turns(contenders, reference(options.framework), settings)
    rows = make_rows(outcomes, settings.ranks)
    given = {name: getattr(options, name) for name in _COMPARED}
    given["data_dir"] = given["data_dir"] and str(given["data_dir"])
    # What the figures depend on.
    about: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "recipe": options.recipe_title,
        "ranks": settings.ranks,
        "global_batch": options.samples_per_step(settings.ranks),
        "epochs": options.epochs,
        "repeats": settings.repeats,
        "seed": options.seed,
        "optimizer": options.optimizer,
        "cores": find_cores().usable,
        "system": f"{platform.system()} on {platform.machine()}",
        "python": platform.python_version(),
        "hvdtrain": __version__,
        "options": {name: value for name, value in given.items() if value not in (None, {})},
    }
    print_tables(rows)
    content = {**about, "contenders": [asdict(row) for row in rows]}
    file, page = settings.out / "compare.json", settings.out / "compare.html"
    file.write_text(json_text(content, indent=2) + "\n", encoding="utf-8")
    write_page(page, about, rows)
    print(f"{page}, {file}", flush=True)
    return any(not row.failure for row in rows[:-1])


def _python(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not name or not os.access(path, os.X_OK):
        raise UsageError(f"--python {text!r}: write NAME=PATH, with the path of an interpreter")
    return name, os.path.abspath(path)
