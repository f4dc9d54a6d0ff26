"""`hvdtrain train`: train a recipe on all ranks; and options of the commands that use the model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from hvdtrain.errors import UsageError
from hvdtrain.train.config_file import config_text, resolve
from hvdtrain.train.option import Option
from hvdtrain.train.options import OPTIONS, RECIPES, TrainOptions, key_of_name_elsewhere
from hvdtrain.world import promised_world

F = TypeVar("F", bound=Callable[..., object])

# Help of the options that only the command line has, by flag.
OF_CONFIGURATION = {
    "--config": "A YAML file with any of these options; the command line wins.",
    "--print-config": "Print all options as such a file and leave.",
}


class GroupedCommand(click.Command):
    """A command that lists its options by topic."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and name the option that is meant by a name from elsewhere."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = key_of_name_elsewhere(error.option_name.removeprefix("--"))
            if meant is None:
                raise
            text = f"No such option '{error.option_name}'. Did you mean '--{meant}'?"
            raise click.UsageError(text, ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of a run by group, then those of the command line alone."""
        groups = {option.name: option.group for option in OPTIONS}
        rows: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            if isinstance(one, click.Option) and (row := one.get_help_record(ctx)) is not None:
                rows.setdefault(groups.get(one.name or "", "Command line"), []).append(row)
        for title, lines in rows.items():
            with formatter.section(title):
                formatter.write_dl(lines)


def with_train_options(function: F) -> F:
    """Add all options of a run to a command; None means that the user has not given one."""
    for option in reversed(OPTIONS):
        function = _parameter(option)(function)
    return function


def _parameter(option: Option) -> Callable[[F], F]:
    if option.name == "recipe":
        return click.argument("recipe", required=False, metavar=f"[{option.metavar}]")
    flag = f"--{option.key}"
    settings: dict[str, Any] = {"default": None, "help": option.text}
    if option.default_text:
        settings["help"] += f"  [default: {option.default_text}]"
    if option.kind is bool:
        return click.option(f"{flag}/--no-{option.key}", **settings)
    settings["metavar"] = option.metavar or None
    if option.kind is Mapping:
        return click.option(flag, multiple=True, **settings)
    return click.option(flag, type=option.kind, **settings)


_HELP = f"""Train a recipe on all ranks; without mpirun, on one.

A recipe is built in ({", ".join(RECIPES)}; by default digits), or a function in a file of yours:
train my_recipe.py --set width=64.
"""


@click.command(cls=GroupedCommand, help=_HELP)
@with_train_options
@click.option("--config", type=Path, metavar="FILE", help=OF_CONFIGURATION["--config"])
@click.option("--print-config", is_flag=True, help=OF_CONFIGURATION["--print-config"])
def command(print_config: bool, **given: Any) -> None:
    """Train, or print the options with which training would run."""
    asked = read_options(given)
    if print_config:
        promised = promised_world(os.environ)
        if promised is None or promised.rank == 0:
            click.echo(config_text(asked), nl=False)
        return
    hold_stop_signal()
    from hvdtrain.train.session import find, train

    (find if asked.find_lr or asked.find_batch_size else train)(asked)


def hold_stop_signal() -> None:
    """Keep SIGUSR1 from ending a rank that does not handle it yet, or no longer.

    StopSignals unblocks it, and then restores what it was. Linux keeps one that is blocked although
    it is ignored.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def refuse_wrong_options(words: Sequence[str]) -> None:
    """Raise as `train` does for words that it refuses, without starting it; answer --help."""
    parent = click.get_current_context().parent
    read_options(command.make_context("train", list(words), parent).params)


def read_options(given: dict[str, Any]) -> TrainOptions:
    """Return the options on the command line and in the file that it names."""
    said = {name: value for name, value in given.items() if value is not None}
    arguments = _arguments(said.pop("set", ()))
    config = said.pop("config", None)
    said.pop("print_config", None)
    return resolve({**said, "set": arguments}, config)


def _arguments(words: Sequence[str]) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"--set {word!r}: write it as NAME=VALUE")
        if name in arguments:
            raise UsageError(f"--set {name} is given twice: {arguments[name]!r} and {value!r}")
        arguments[name] = value
    return arguments


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

    with_options: Callable[..., None] = wrapped
    for flag, (kind, text) in reversed(_CHANGES.items()):
        with_options = click.option(flag, type=kind, help=text)(with_options)
    return click.option(
        "--checkpoint",
        default="best",
        show_default=True,
        metavar="[best|newest|PATH]",
        help="Which one; best is the newest where nothing was evaluated.",
    )(with_options)
