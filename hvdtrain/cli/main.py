"""The command group: finds the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from hvdtrain import __version__
from hvdtrain.errors import (
    EXIT_USAGE,
    HvdtrainError,
    OneRankError,
    RecipeError,
    TrainingError,
    UsageError,
    did_you_mean,
)
from hvdtrain.milestones import begin
from hvdtrain.world import promised_world

_COMMANDS = {
    "train": "Train a recipe on all ranks (the default: train digits).",
    "evaluate": "Evaluate a trained model on its test samples.",
    "predict": "Compute the outputs of a trained model for files.",
    "run": "Start ranks with the mpirun that belongs to the installed MPI.",
    "sweep": "Train a recipe again and again, and find the best options.",
    "report": "Write one HTML page about runs: curves, where the time went, options.",
    "why": "Say which rank of a job failed first, in what, and what to try.",
    "timeline": "Merge the timelines that the ranks of a failed job have left into one.",
    "hosts": "Read and check the hosts of a file or a job, and write them for a launcher.",
    "job": "Write a job script for a scheduler.",
    "script": "Run a script written for Horovod on hvdtrain.",
    "exec": "Run a script for torch.distributed or TensorFlow, with the variables that it needs.",
    "lint": "Find mistakes with ranks in scripts for Horovod, DDP and others.",
    "check": "Show what is installed, try two ranks, and say how to fix what is wrong.",
    "exchanges": "List what ranks can send one another in each step: train --exchange.",
    "compare": "Train a recipe under several strategies, and compare time and results.",
    "bench": "Compare with Horovod, DDP and others, and predict how a step scales.",
    "build-horovod": "Build and install Horovod for the installed frameworks.",
}

# Commands of the packages beside hvdtrain in the wheel, found by their entry points.
_BESIDE = ("report", "why", "lint", "compare", "bench")


class _LazyGroup(click.Group):
    """A group that imports a subcommand's module only when it is called, so that --help is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        if name in _BESIDE:
            return _installed(name)
        module = importlib.import_module(f"hvdtrain.cli.{name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not ctx.resilient_parsing:
            hint = did_you_mean(args[0], _COMMANDS) or f": one of {', '.join(_COMMANDS)}"
            ctx.fail(f"there is no command '{args[0]}'{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = words_of_train(args)
        if words is not None:
            args = ["train", *words]
        return super().parse_args(ctx, args)


def words_of_train(arguments: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of `train`, whose name may be left out; None for another command."""
    if not arguments:
        return arguments
    own = ("--help", "--version")
    if arguments[0].startswith("-") and arguments[0] not in own:
        return arguments
    return arguments[1:] if arguments[0] == "train" else None


def _installed(name: str) -> click.Command:
    """Return the command of a package beside hvdtrain."""
    from importlib.metadata import entry_points  # takes longer to import than --help to print
    from importlib.util import find_spec

    for point in entry_points(group="hvdtrain.commands", name=name):
        if find_spec(point.module.partition(".")[0]) is not None:
            command: click.Command = point.load()
            return command
    raise UsageError(
        f"'{name}' is a command of a package that is installed together with hvdtrain: reinstall "
        "hvdtrain, or in a checkout: pip install -e ."
    )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["--help", "-h"]})
@click.version_option(__version__, prog_name="hvdtrain")
def group() -> None:
    """One model, many ranks, gradients all-reduced."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code: 0, 1 crash, 2 usage error, 78 wrong launcher."""
    begin(os.environ)
    code: object = 0
    try:
        code = group.main(arguments, prog_name="hvdtrain", standalone_mode=False)
    except click.Abort as abort:  # raised by click for Ctrl-C and for any EOFError
        cause = abort.__cause__ or KeyboardInterrupt()
        raise cause from cause.__cause__
    except click.ClickException as error:
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see '{error.ctx.command_path} --help')"
            if isinstance(error, click.NoSuchOption) and error.ctx.info_name == "run":
                hint = hint if error.possibilities else " (options of train follow --)"
        _refuse(" ".join(error.format_message().split()) + hint, EXIT_USAGE)
    except OneRankError:
        raise  # the other ranks wait for this one and cannot report it
    except HvdtrainError as error:
        told = isinstance(error, TrainingError | RecipeError)  # by all ranks together
        if error.exit_code != EXIT_USAGE and not told:
            raise
        _refuse(str(error), error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str, code: int) -> None:
    """Report an error on one rank, and exit together with the others.

    If a rank exited before the others have reported, the launcher would kill them, and the message
    could be lost: so every rank of a launched job joins the world first. Ranks without an error
    learn of it when options are compared.
    """
    promised = promised_world(os.environ)
    rank = 0
    if promised is not None and promised.size > 1:
        import hvdtrain.core.context as context

        if not context.is_initialized():
            from hvdtrain.train.loop.gather import refuse_options

            context.init()
            refuse_options(message)
        rank = context.current().topology.rank
    if rank == 0:
        print(f"hvdtrain: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
