"""Options of the commands that use a trained model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import click

__all__ = ["with_run_options"]

_CHANGES = {
    "--data-dir": (Path, "Where the recipe's data is now."),
    "--recipe": (str, "Where the recipe's file is now, as FILE.py[:FUNCTION]."),
    "--engine": (str, "What moves the figures."),
    "--device": (str, "auto, cpu or cuda."),
    "--workers": (int, "Loading processes per rank."),
}


def with_run_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add options for the checkpoint, and for settings of a run that may have changed."""

    @wraps(function)
    def wrapped(**given: object) -> None:
        function(**{name: value for name, value in given.items() if value is not None})

    command: Callable[..., None] = wrapped
    for flag, (kind, text) in reversed(_CHANGES.items()):
        command = click.option(flag, type=kind, help=text)(command)
    return click.option(
        "--checkpoint",
        default="best",
        show_default=True,
        metavar="[best|newest|PATH]",
        help="Which one; best is the newest where nothing was evaluated.",
    )(command)
