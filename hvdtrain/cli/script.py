"""`hvdtrain script`: run a script as Python does, with hvdtrain in the place of Horovod."""

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
from hvdtrain.world import promised_world

__all__ = ["command"]

_FOLDER = on_path.__path__[0]
# How much earlier than the others rank 0 says what they all find; the launcher then ends them.
_SPOKESMAN_SECONDS = 5.0


# What follows the script belongs to it.
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
        _refuse(f"no script {script} on {socket.gethostname()}: name an existing file")
    environ = dict(os.environ)
    if as_horovod or not _horovod_is_installed():
        environ["PYTHONPATH"] = _python_path(environ.get("PYTHONPATH"))
    words = [sys.executable, *_interpreter_options(), script, *arguments]
    os.execve(sys.executable, words, environ)


def _python_path(inherited: str | None) -> str:
    """Return where Python looks before it looks among what is installed."""
    entries = inherited.split(os.pathsep) if inherited else []
    return os.pathsep.join([_FOLDER, *(entry for entry in entries if entry != _FOLDER)])


def _horovod_is_installed() -> bool:
    """Return whether a script finds a Horovod, which it does not in this process's directory."""
    path = [entry for entry in sys.path if entry not in (_FOLDER, os.getcwd())]
    spec = PathFinder.find_spec("horovod", path)
    return spec is not None and spec.origin is not None  # any folder of that name has a spec


def _interpreter_options() -> list[str]:
    """Return what stands between `python` and `-m hvdtrain`, or the installed command."""
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    return options[:-2] if options[-2:-1] == ["-m"] else options[:-1]


def _refuse(message: str) -> NoReturn:
    """Say once what is wrong, and end the job, without waiting for ranks that find it right."""
    promised = promised_world(os.environ)
    if promised is not None and promised.rank > 0:
        time.sleep(_SPOKESMAN_SECONDS)
    click.echo(f"hvdtrain: {message}", err=True)
    sys.exit(EXIT_USAGE)
