"""`hvdtrain exec`: run a script that finds its ranks in variables, under any MPI launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from hvdtrain.cli.script import refuse_locally
from hvdtrain.collective import collective
from hvdtrain.errors import UsageError
from hvdtrain.launch.cluster_environment import (
    ClusterRank,
    check_roles,
    free_ports,
    jax_variables,
    parse_roles,
    tensorflow_config,
    torch_variables,
)
from hvdtrain.launch.scripts import chief
from hvdtrain.launch.scripts.script import (
    Script,
    Settings,
    accelerate_variables,
    default_file,
    has_gpu,
    read_file,
    remarks,
)
from hvdtrain.world import promised_world

# How long the processes that joined the ranks of this host may take to end.
_ENDS_SECONDS = 10.0

# Ranks of a host that draw the same port take another one of these.
_PORTS = 8


# Options end before the script, or -m; all that follows belongs to it.
@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option("--roles", help="Of the ranks, for TF_CONFIG: chief:1,worker:2 (default: workers).")
@click.option("--print", "only_print", is_flag=True, help="Print the variables and leave.")
@click.option("passed", "--local_rank", flag_value="--local_rank", help="Pass it to the script.")
@click.option("passed", "--local-rank", flag_value="--local-rank", help="The same, as torch >= 2.")
@click.option(
    "--accelerate-config",
    "settings_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Of `accelerate config`; scripts that import Accelerate get the default one.",
)
@click.argument(
    "arguments",
    metavar="[SCRIPT | -m MODULE] [ARGUMENTS]...",
    nargs=-1,
    type=click.UNPROCESSED,
)
@click.pass_context
def command(
    ctx: click.Context,
    roles: str | None,
    only_print: bool,
    passed: str | None,
    settings_file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Give a script the world that it expects: mpirun -np 4 ... exec train.py --lr 0.1.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and more are for torch.distributed,
    Accelerate and Lightning, TF_CONFIG for tf.distribute, and JAX_COORDINATOR_ADDRESS and
    KERAS_DISTRIBUTION_* for JAX and Keras.
    """
    if arguments and arguments[0].startswith("-") and arguments[0] != "-m":
        raise click.NoSuchOption(arguments[0].partition("=")[0], ctx=ctx)
    try:  # files that are missing on one host are an error of some ranks only
        named = None if roles is None else parse_roles(roles)
        script = Script.parse(arguments) if arguments or not only_print else None
        watched = script is not None and script.uses_accelerate()
        found = settings_file or (default_file(os.environ) if watched else None)
        settings = None if found is None else read_file(found)
    except UsageError as error:
        _refuse_together(f"{socket.gethostname()}: {error}")
    # Ranks that wait for the end of others need their addresses before they run their scripts.
    waiting = named is not None and chief.leading_ranks(named) and not only_print
    listening = chief.listen(os.environ) if waiting else None
    place = _report_rank(listening)
    named = named or ["worker"] * place.size
    try:
        check_roles(named, place.size)
    except UsageError as error:
        refuse_locally(str(error))
    gpu = has_gpu(os.environ)
    variables = torch_variables(place) | {"TF_CONFIG": tensorflow_config(place, named)}
    variables |= jax_variables(place)
    of_accelerate = accelerate_variables(settings, gpu).items()
    variables |= {name: value for name, value in of_accelerate if name not in os.environ}
    if only_print or script is None:
        click.echo("".join(f"{name}={value}\n" for name, value in variables.items()), nl=False)
        return
    if place.rank == 0:
        _say_remarks(script, settings, place.size, gpu)
    words = script.command(None if passed is None else f"{passed}={place.local_rank}", watched)
    if listening is None:
        _become(words, variables)
    sys.exit(_run_role(words, variables, named, place, listening))


def _say_remarks(script: Script, settings: Settings | None, size: int, gpu: bool) -> None:
    for remark in () if settings is None else remarks(settings, size, gpu):
        click.echo(f"hvdtrain: {remark}", err=True)
    if size > 1 and script.ignores_ranks():
        click.echo(
            f"hvdtrain: {script.program[-1]} neither joins the other ranks nor asks for its rank: "
            f"each of the {size} ranks does all of the work. Use hvdtrain.torch or "
            "torch.distributed in it, or start one rank",
            err=True,
        )


def _report_rank(listening: socket.socket | None) -> ClusterRank:
    ports = ",".join(str(port) for port in free_ports(_PORTS))
    command = [sys.executable, "-m", "hvdtrain.core.rank_report", ports]
    if listening is not None:
        command.append(str(listening.getsockname()[1]))
    environ, promised = dict(os.environ), promised_world(os.environ)
    if promised is not None and promised.size == 1:
        # Under mpirun 5.0.11, a rank's second process can wait in MPI_Init for ever.
        environ["HVDTRAIN_ENGINE"] = "local"
    # MPICH's ranks reach their launcher through an inherited descriptor, named in a variable.
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, close_fds=False, env=environ
    )
    if done.returncode != 0:
        sys.exit(done.returncode)
    found = json.loads(done.stdout.splitlines()[-1])
    _wait_for_ends(found.pop("processes"))
    facts: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
    return ClusterRank(**facts)


def _wait_for_ends(processes: Sequence[int]) -> None:
    # mpirun 5.0.11 may note late that a rank's first process has ended, and then gives other ranks
    # its addresses for those of the script.
    deadline = time.monotonic() + _ENDS_SECONDS
    for process in processes:
        with suppress(OSError):  # it has ended
            while time.monotonic() < deadline:
                os.kill(process, 0)
                time.sleep(0.005)


@collective
def _refuse_together(message: str) -> NoReturn:
    """Report an error that other ranks may not have, and end with them."""
    # mpirun 5.0.11 hangs or crashes if a rank ends while another one connects to it.
    command = [sys.executable, "-m", "hvdtrain.core.rank_report", "--error", message]
    sys.exit(subprocess.run(command, check=False, close_fds=False).returncode)


def _run_role(
    words: list[str],
    variables: dict[str, str],
    roles: Sequence[str],
    place: ClusterRank,
    listening: socket.socket,
) -> int:
    """Run the script of one rank in a job that ends when those that lead do; return its code."""
    environ, rank = {**os.environ, **variables}, place.rank
    leaders = chief.leading_ranks(roles)
    if rank in leaders:
        code, told = chief.run_leading(words, environ, listening)
        if told and roles[rank] in chief.CHIEFS:
            click.echo(
                f"hvdtrain: the chief has ended: {told} ranks (worker and ps), which would wait "
                "forever, end with it",
                err=True,
            )
        return code
    listening.close()
    if not chief.follows(rank, roles):
        _become(words, variables)
    addresses = [place.control_addresses[each] for each in leaders]
    code, ended = chief.run_following(words, environ, addresses)
    if ended and roles[leaders[0]] == "worker" and rank == list(roles).index("ps"):
        click.echo("hvdtrain: all workers have ended: parameter servers end with them", err=True)
    return code


def _become(words: list[str], variables: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, {**os.environ, **variables})
