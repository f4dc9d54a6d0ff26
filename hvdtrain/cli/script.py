"""`hvdtrain script`: run a script as Python does, with hvdtrain in place of Horovod."""

from __future__ import annotations

import os
import socket
import sys
import time
from importlib.machinery import PathFinder
from typing import NoReturn

import click

from hvdtrain.errors import EXIT_USAGE
from hvdtrain.horovod.names import on_path
from hvdtrain.launch.scripts.script import interpreter_options
from hvdtrain.world import promised_world

# Head start of rank 0 in reporting an error that all ranks have; the launcher then ends the others.
_HEAD_START_SECONDS = 5.0


def refuse_locally(message: str) -> NoReturn:
    """Report an error and exit, without waiting for ranks that may not have it."""
    promised = promised_world(os.environ)
    if promised is not None and promised.rank > 0:
        time.sleep(_HEAD_START_SECONDS)
    click.echo(f"hvdtrain: {message}", err=True)
    sys.exit(EXIT_USAGE)


_FOLDER = on_path.__path__[0]


# Arguments after the script belong to it.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--as-horovod", is_flag=True, help="hvdtrain answers also for an installed Horovod.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(as_horovod: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run a script written for Horovod on this rank: script train.py --lr 0.1.

    Where Horovod is not installed, `import horovod.torch` gives hvdtrain.torch, in the script and
    in the Python processes that it starts.
    """
    if not os.path.exists(script):
        refuse_locally(f"no script {script} on {socket.gethostname()}: name an existing file")
    environ = dict(os.environ)
    if as_horovod or not _horovod_is_installed():
        # hvdtrain's `horovod` precedes installed packages.
        entries = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
        others = [entry for entry in entries if entry != _FOLDER]
        environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *others])
    words = [sys.executable, *interpreter_options(), script, *arguments]
    os.execve(sys.executable, words, environ)


def _horovod_is_installed() -> bool:
    """Return whether the script would find a Horovod, apart from this process's directory."""
    path = [entry for entry in sys.path if entry not in (_FOLDER, os.getcwd())]
    spec = PathFinder.find_spec("horovod", path)
    # A namespace package has a spec without an origin.
    return spec is not None and spec.origin is not None
