"""A comparison from its options to its table, its file and its page."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.check.checks import find_cores
from hvdtrain.train.options import RUNS, TrainOptions
from hvdtrain.train.records import json_text, new_directory, prepare_directory
from hvdtrain_compare.contenders import Contender, reference
from hvdtrain_compare.results.page import require_jinja, write_page
from hvdtrain_compare.results.row import Row, make_rows
from hvdtrain_compare.results.tables import print_tables
from hvdtrain_compare.turns import Settings, run_turns

# Options that say what is trained; the others have no meaning for other libraries.
_COMPARED = (
    *("recipe", "set", "data_dir", "framework", "backend", "dtype"),
    *("epochs", "batch_size", "optimizer", "lr", "seed"),
)


@dataclass(frozen=True)
class Request:
    """What is to be compared."""

    contenders: Sequence[Contender]
    options: TrainOptions
    ranks: int
    repeats: int
    check_steps: int
    limit_seconds: float
    out: Path | None


def compare(request: Request) -> bool:
    """Run all contenders, and print and write what they did."""
    require_jinja()
    out = request.out
    if out is None:
        out = new_directory(RUNS, "compare")
    else:
        prepare_directory(out)
    options = {name: getattr(request.options, name) for name in _COMPARED}
    options["data_dir"] = options["data_dir"] and str(options["data_dir"])
    settings = Settings(
        options,
        request.ranks,
        request.repeats,
        request.check_steps,
        request.limit_seconds,
        out,
    )
    outcomes = run_turns(request.contenders, reference(request.options.framework), settings, _say)
    rows = make_rows(outcomes, request.ranks)
    about = _about(request, options)
    print_tables(rows)
    _write_json(out / "compare.json", about, rows)
    write_page(out / "compare.html", about, rows)
    print(f"{out / 'compare.html'}, {out / 'compare.json'}", flush=True)
    return any(not row.failure for row in rows[:-1])


def _about(request: Request, options: dict[str, Any]) -> dict[str, Any]:
    """Return what the figures depend on."""
    cores = find_cores()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "recipe": request.options.recipe_title,
        "ranks": request.ranks,
        "global_batch": request.options.samples_per_step(request.ranks),
        "epochs": request.options.epochs,
        "repeats": request.repeats,
        "seed": request.options.seed,
        "optimizer": request.options.optimizer,
        "cores": cores.usable,
        "system": f"{platform.system()} on {platform.machine()}",
        "python": platform.python_version(),
        "hvdtrain": __version__,
        "options": {name: value for name, value in options.items() if value not in (None, {})},
    }


def _write_json(path: Path, about: dict[str, Any], rows: Sequence[Row]) -> None:
    content = {**about, "contenders": [asdict(row) for row in rows]}
    path.write_text(json_text(content, indent=2) + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
