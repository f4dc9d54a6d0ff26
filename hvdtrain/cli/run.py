"""`hvdtrain run`: start ranks with the mpirun that belongs to the installed MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.formats import read_file, read_hostfile
from hvdtrain.launch.mpi_library import find_mpirun, loaded_library
from hvdtrain.launch.mpirun import LaunchCommand, mpirun_command
from hvdtrain.launch.program import OF_RANKS, is_script, rank_words
from hvdtrain.world import promised_world

__all__ = ["command"]


# What follows the first free-standing argument belongs to the ranks.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("ranks", "-np", "-n", "--num-ranks", type=int, help="How many ranks.")
@click.option("-hostfile", "--hostfile", help="Hosts in the MPI's own grammar; default: here.")
@click.option("--as-horovod", is_flag=True, help="hvdtrain answers also for an installed Horovod.")
@click.option("--dry-run", is_flag=True, help="Print the command and leave.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    hostfile: str | None,
    as_horovod: bool,
    dry_run: bool,
    arguments: tuple[str, ...],
) -> None:
    """Start ranks: run -np 4 [-hostfile FILE] [-- ARGUMENTS].

    ARGUMENTS are those of `python -m hvdtrain` (none: train digits), or a script and its own:
    run -np 4 -- train.py --lr 0.1, which may be written for Horovod. Without -np, one rank for
    each slot of the hostfile.
    """
    _require_sense(ranks, hostfile, arguments)
    if as_horovod and not is_script(arguments):
        raise UsageError("--as-horovod is for a script: run --as-horovod -np N -- script.py")
    library = loaded_library()
    if hostfile is not None:
        read_hostfile(hostfile, library.vendor)
    line = mpirun_command(
        str(find_mpirun(library)),
        library.vendor,
        [sys.executable, "-m", "hvdtrain", *rank_words(arguments, as_horovod)],
        ranks=ranks,
        hostfile=hostfile,
        environ=os.environ,
        root=os.geteuid() == 0,
    )
    if dry_run:
        click.echo(line.shell())
    else:
        _become(line)


def _require_sense(ranks: int | None, hostfile: str | None, arguments: tuple[str, ...]) -> None:
    promised = promised_world(os.environ)
    if promised is not None and promised.size > 1:
        raise UsageError(f"'run' starts ranks itself: call it without {promised.launcher}")
    if ranks is None and hostfile is None:
        raise UsageError("how many ranks? Say -np N, or name a hostfile with -hostfile FILE")
    if ranks is not None and ranks < 1:
        raise UsageError(f"-np {ranks} must be at least 1")
    if hostfile is not None:
        read_file(hostfile)
    if is_script(arguments) and not Path(arguments[0]).is_file():
        raise UsageError(f"no script {arguments[0]} here: name an existing file")
    word = arguments[0] if arguments else "train"
    if not (word.startswith("-") or word in OF_RANKS or is_script(arguments)):
        raise UsageError(_not_for_ranks(word))


def _not_for_ranks(word: str) -> str:
    if Path(word).name.startswith("python"):
        return f"'run' starts Python itself: leave out '{word}', as in run -np 2 script.py"
    return f"'{word}' is nothing that ranks run: name a script, or one of {', '.join(OF_RANKS)}"


def _become(line: LaunchCommand) -> NoReturn:
    """Turn this process into mpirun: its signals and its exit code need no go-between."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(line.argv[0], line.argv, {**os.environ, **line.variables})
