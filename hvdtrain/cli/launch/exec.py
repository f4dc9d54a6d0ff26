"""`hvdtrain exec`: run a script that finds its ranks in variables, under any MPI launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

__all__ = ["command"]


# Arguments after the script belong to it.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--roles", help="Of the ranks, for TF_CONFIG: chief:1,worker:2 (default: workers).")
@click.option("--print", "only_print", is_flag=True, help="Print the variables and leave.")
@click.option("-m", "module", help="Run a module by its name, as `python -m` does.")
@click.argument("arguments", metavar="[SCRIPT] [ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    roles: str | None, only_print: bool, module: str | None, arguments: tuple[str, ...]
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
    place = _report_rank()
    names = parse_roles(roles or f"worker:{place.size}", place.size)
    variables = torch_variables(place) | {"TF_CONFIG": tensorflow_config(place, names)}
    variables |= jax_variables(place)
    if only_print:
        click.echo("".join(f"{name}={value}\n" for name, value in variables.items()), nl=False)
    else:
        program = [] if module is None else ["-m", module]
        _become([sys.executable, *program, *arguments], variables)


def _report_rank() -> ClusterRank:
    command = [sys.executable, "-m", "hvdtrain.core.rank_report"]
    # MPICH's ranks reach their launcher through an inherited descriptor, named in a variable.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, close_fds=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return ClusterRank.from_facts(json.loads(done.stdout.splitlines()[-1]))


def _become(words: list[str], variables: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, {**os.environ, **variables})
