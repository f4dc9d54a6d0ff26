"""`hvdtrain exec`: run a script that finds its ranks in variables, under any MPI launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch.cluster_environment import (
    ClusterRank,
    jax_variables,
    parse_roles,
    tensorflow_config,
    torch_variables,
)
from hvdtrain.launch.ports import free_port
from hvdtrain.launch.scripts import accelerate, chief
from hvdtrain.launch.scripts.watched import uses_accelerate

__all__ = ["command"]


# Arguments after the script belong to it.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--roles", help="Of the ranks, for TF_CONFIG: chief:1,worker:2 (default: workers).")
@click.option("--print", "only_print", is_flag=True, help="Print the variables and leave.")
@click.option("-m", "module", help="Run a module by its name, as `python -m` does.")
@click.option("passed", "--local_rank", flag_value="--local_rank", help="Pass it to the script.")
@click.option("passed", "--local-rank", flag_value="--local-rank", help="The same, as torch >= 2.")
@click.option(
    "--accelerate-config",
    "settings_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Of `accelerate config`; scripts that import Accelerate get the default one.",
)
@click.argument("arguments", metavar="[SCRIPT] [ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    roles: str | None,
    only_print: bool,
    module: str | None,
    passed: str | None,
    settings_file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Give a script the world that it expects: mpirun -np 4 ... exec train.py --lr 0.1.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and more are for torch.distributed,
    Accelerate and Lightning, TF_CONFIG for tf.distribute, and JAX_COORDINATOR_ADDRESS and
    KERAS_DISTRIBUTION_* for JAX and Keras.
    """
    if module is None and not arguments and not only_print:
        raise UsageError("which script? Name one, or a module with -m, or pass --print")
    if module is None and arguments and not os.path.isfile(arguments[0]):
        raise UsageError(f"there is no file {arguments[0]}: name an existing script")
    watched = module is None and bool(arguments) and uses_accelerate(arguments[0])
    named = settings_file or (accelerate.default_file(os.environ) if watched else None)
    settings = None if named is None else accelerate.read_file(named)
    # Ranks that wait for the chief's end need its address before they run their scripts.
    listening = chief.listen() if chief.has_waiting_ranks(roles) and not only_print else None
    place = _report_rank(listening)
    names = parse_roles(roles or f"worker:{place.size}", place.size)
    variables = torch_variables(place) | {"TF_CONFIG": tensorflow_config(place, names)}
    variables |= jax_variables(place)
    gpu = accelerate.has_gpu(os.environ)
    found = accelerate.accelerate_variables(settings, gpu)
    variables |= {name: value for name, value in found.items() if name not in os.environ}
    if only_print:
        click.echo("".join(f"{name}={value}\n" for name, value in variables.items()), nl=False)
        return
    if settings is not None and place.rank == 0:
        for remark in accelerate.remarks(settings, place.size, gpu):
            click.echo(f"hvdtrain: {remark}", err=True)
    words = _words(module, arguments, watched, None if passed is None else (passed, place))
    if listening is None:
        _become(words, variables)
    sys.exit(_run_role(words, variables, names, place, listening))


def _report_rank(listening: socket.socket | None) -> ClusterRank:
    command = [sys.executable, "-m", "hvdtrain.core.rank_report", str(free_port())]
    if listening is not None:
        command.append(str(listening.getsockname()[1]))
    # MPICH's ranks reach their launcher through an inherited descriptor, named in a variable.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, close_fds=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return ClusterRank.from_facts(json.loads(done.stdout.splitlines()[-1]))


def _words(
    module: str | None,
    arguments: Sequence[str],
    watched: bool,
    passed: tuple[str, ClusterRank] | None,
) -> list[str]:
    """Return the command line of the script, with its local rank first if it wants that."""
    program = ["-m", module] if module is not None else [arguments[0]]
    rest = arguments if module is not None else arguments[1:]
    if watched:
        program = ["-m", "hvdtrain.launch.scripts.watched", *program]
    local = [] if passed is None else [f"{passed[0]}={passed[1].local_rank}"]
    return [sys.executable, *program, *local, *rest]


def _run_role(
    words: list[str],
    variables: dict[str, str],
    roles: Sequence[str],
    place: ClusterRank,
    listening: socket.socket,
) -> int:
    """Run the script of one rank in a job that ends when its chief does; return the exit code."""
    environ = {**os.environ, **variables}
    role, first = roles[place.rank], list(roles).index("chief")
    if role == "chief":
        code, told = chief.run_as_chief(words, environ, listening)
        if told:
            ending = " and ".join(chief.ENDED_WITH_THE_CHIEF)
            click.echo(
                f"hvdtrain: the chief has ended: {told} ranks ({ending}), which would wait for "
                "ever, end with it",
                err=True,
            )
        return code
    listening.close()
    if role not in chief.ENDED_WITH_THE_CHIEF:
        _become(words, variables)
    return chief.run_with_chief(words, environ, place.control_addresses[first])


def _become(words: list[str], variables: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, {**os.environ, **variables})
