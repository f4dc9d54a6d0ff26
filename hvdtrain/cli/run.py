"""`hvdtrain run`: start ranks with the launcher that belongs to the installed MPI."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.check.checks import find_cores
from hvdtrain.cli.main import words_of_train
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import total_slots
from hvdtrain.launch.launchers.choice import NAMES, Launcher, choose_launcher
from hvdtrain.launch.launchers.mpi_library import loaded_library
from hvdtrain.launch.launchers.options import (
    discovered_hosts,
    limit_variables,
    parse_exports,
    parse_folder,
    parse_hosts,
    require_sense,
    require_tolerance,
    with_hosts,
)
from hvdtrain.launch.launchers.request import (
    BINDINGS,
    LaunchCommand,
    LaunchRequest,
    has_allocation,
)
from hvdtrain.launch.remote_shell import require_reachable
from hvdtrain.launch.restarts import ElasticJob
from hvdtrain.launch.scripts.script import is_script, rank_words, require_program
from hvdtrain.launch.staging import remove_unused, staged
from hvdtrain.launch.supervise import SESSION, Launches, session_folder

if TYPE_CHECKING:
    from hvdtrain.train.sweep import Sweep


# Everything after the first positional argument belongs to the ranks.
@click.command(context_settings={"allow_interspersed_args": False})
@click.option("ranks", "-np", "-n", "--num-ranks", type=int, help="How many ranks.")
@click.option("-hostfile", "--hostfile", help="Hosts in the MPI's own grammar; default: here.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts, instead of a file.")
@click.option("--per-node", type=click.IntRange(1), help="Ranks on each host.")
@click.option("exports", "-x", metavar="NAME[=VALUE]", multiple=True, help="Variable for ranks.")
@click.option("--interface", metavar="NAME", help="Network interface, as in eth0.")
@click.option("--bind", type=click.Choice(BINDINGS), help="What a rank is bound to; default: none.")
@click.option("log_folder", "--output-dir", metavar="DIR", help="Each rank writes DIR/rank.N.log.")
@click.option("--prefix", is_flag=True, help="Lines of output begin with their rank.")
@click.option("--timestamps", is_flag=True, help="Lines of output begin with a time.")
@click.option("--launcher", type=click.Choice(NAMES), help="Default: by MPI.")
@click.option("--as-horovod", is_flag=True, help="hvdtrain answers also for an installed Horovod.")
@click.option("--elastic", is_flag=True, help="Survive lost ranks: the others continue.")
@click.option("--min-np", type=click.IntRange(1), help="With --elastic: end if fewer are left.")
@click.option("--max-np", type=click.IntRange(1), help="With --elastic: replace lost ranks.")
@click.option("discovery", "--host-discovery-script", metavar="FILE", help="Prints HOST:SLOTS.")
@click.option("stage_folder", "--stage-env", metavar="DIR", help="Carry Python to the nodes.")
@click.option("--verbose", is_flag=True, help="Also what the launcher says of failed ranks.")
@click.option("--dry-run", is_flag=True, help="Print the command and leave.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    launcher: str | None,
    as_horovod: bool,
    min_np: int | None,
    max_np: int | None,
    discovery: str | None,
    stage_folder: str | None,
    verbose: bool,
    dry_run: bool,
    arguments: tuple[str, ...],
    **asked: Any,
) -> int:
    """Start ranks: run -np 4 [-hostfile FILE] [-- ARGUMENTS].

    ARGUMENTS are those of `python -m hvdtrain` (none: train digits), or a script and its own:
    run -np 4 -- train.py --lr 0.1, which may be written for Horovod. Without -np, one rank for
    each slot of the hosts, or each core here.
    """
    unsaid = all(asked[name] is None for name in ("ranks", "per_node", "hosts", "hostfile"))
    if unsaid and discovery is None and not has_allocation(os.environ):
        asked["ranks"] = max(1, int(find_cores().usable))
    hosts, ranks, elastic = asked["hosts"], asked["ranks"], asked["elastic"]
    if discovery is not None and hosts is None and asked["hostfile"] is None:
        hosts = discovered_hosts(discovery)
    asked["hosts"] = parse_hosts(hosts)
    asked["exports"] = {
        **parse_exports(asked["exports"], os.environ),
        **limit_variables(min_np, max_np, discovery, ranks, elastic),
    }
    asked["log_folder"] = parse_folder(asked["log_folder"])
    program = (sys.executable, "-m", "hvdtrain", *rank_words(arguments, as_horovod))
    request = LaunchRequest(program, **asked)
    both = "-hostfile and -H both name hosts: leave out one of them"
    require_sense(request, "'run'", f"-np {ranks} must be at least 1", both)
    if request.log_folder and (request.prefix or request.timestamps):
        raise UsageError(
            "--prefix and --timestamps cannot be combined with --output-dir: leave them out"
        )
    require_program(arguments)
    if is_script(arguments) and not os.path.isfile(arguments[0]):
        raise UsageError(f"there is no file {arguments[0]}: name an existing script")
    if as_horovod and not is_script(arguments):
        raise UsageError("--as-horovod is for a script: run --as-horovod -np N -- script.py")
    words = words_of_train(arguments)
    if words is not None:
        from hvdtrain.cli.train import refuse_wrong_options  # its options take long to import

        refuse_wrong_options(words)
    sweep = None
    if arguments[:1] == ("sweep",):
        from hvdtrain.cli.sweep import read_sweep

        sweep = read_sweep(arguments[1:])
    if stage_folder is not None:
        if elastic:
            raise UsageError("--stage-env cannot be combined with --elastic: leave one out")
        request = replace(request, program=staged(request, stage_folder, not dry_run))
        if not dry_run:
            click.get_current_context().call_on_close(remove_unused)
    library = loaded_library()
    chosen = choose_launcher(launcher, library, os.environ, missing_ok=dry_run)
    if elastic:
        require_tolerance(library, chosen.name)
    request = with_hosts(request, chosen, os.environ)
    if sweep is not None and sweep.ranks_per_trial is not None:
        return _run_trials(sweep, request, chosen, dry_run, verbose)
    line = chosen.command(request, os.environ)
    if dry_run:
        click.echo(line.shell())
        return 0
    if chosen.name == "mpirun" and not elastic:
        require_reachable(request, os.environ)
    job = ElasticJob(chosen, request, min_np or 1) if elastic else None
    trains = words is not None or arguments[:1] == ("sweep",)
    return _run(line, job, _interrupts(trains, chosen), verbose or elastic)


def _run_trials(
    sweep: Sweep, request: LaunchRequest, launcher: Launcher, dry_run: bool, verbose: bool
) -> int:
    """Train several trials at once, each with a launcher of its own."""
    from hvdtrain.launch.side_by_side import divided, run_at_once
    from hvdtrain.train.sweep import close_sweep, prepare_sweep

    each = sweep.ranks_per_trial or 1
    ranks = request.ranks or total_slots(request.hosts)
    unnamed = has_allocation(os.environ) and not request.hosts
    refused = request.elastic or request.per_node or launcher.name != "mpirun"
    # Each mpirun would bind its ranks from core 0 on.
    refused = refused or request.bind not in (None, "none")
    # The hosts of a part go into its command, which has no words for more than slots.
    more = any(host.user or host.others for host in request.hosts)
    if refused or more or unnamed or not ranks:
        raise UsageError(
            f"--ranks-per-trial {each} needs mpirun, -np N on this host or hosts with their slots "
            "and nothing else, and neither --per-node, --elastic nor --bind"
        )
    cores, share = int(find_cores().usable), sweep.options.share_gpus
    jobs = divided(request, ranks, each, cores, os.environ, share)[: sweep.trials]
    if not jobs:
        raise UsageError(f"--ranks-per-trial {each} is more than the {ranks} ranks: lower it")
    if not dry_run:
        sweep = prepare_sweep(sweep)
    words = "--start", sweep.start, "--out", str(sweep.options.out)
    programs = [replace(job, program=(*job.program, *words)) for job in jobs]
    lines = [launcher.command(program, os.environ) for program in programs]
    if dry_run:
        click.echo("\n".join(line.shell() for line in lines))
        return 0
    require_reachable(request, os.environ)
    idle = ranks - each * len(jobs)
    text = f"trials at once: {len(jobs)}, ranks of each: {each}, idle ranks: {idle}"
    print(text, flush=True)
    signals = _interrupts(True, launcher)
    codes = run_at_once([partial(_run, line, None, signals, verbose) for line in lines])
    return close_sweep(sweep, codes)


def _interrupts(trains: bool, launcher: Launcher) -> list[signal.Signals]:
    """Return what the launcher gets for each Ctrl-C in place of SIGINT, if anything."""
    # Open MPI's mpirun ends its ranks alike for SIGINT and SIGTERM, but prints lines for SIGINT.
    # Other launchers pass signals on. Ranks that train handle SIGTERM, but no SIGUSR2.
    is_open_mpi = launcher.name == "mpirun" and launcher.vendor == "openmpi"
    ends = signal.SIGTERM if is_open_mpi else signal.SIGUSR2
    if trains:
        return [signal.SIGUSR1, ends]
    return [ends] if is_open_mpi else []


def _run(
    line: LaunchCommand, job: ElasticJob | None, interrupts: list[signal.Signals], verbose: bool
) -> int:
    try:
        if line.folder is not None:
            os.makedirs(line.folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create a directory: {error}") from None
    with session_folder(os.environ) as session:
        environ = {SESSION: session.folder, **os.environ, **line.variables}
        launches = Launches([session.lifeline], interrupts, verbose)
        try:
            if job is None:
                code = launches.run(line.argv, environ)
            else:
                code = job.run(launches, environ, Path(session.folder))
        except OSError as error:
            raise UsageError(f"{line.argv[0]} cannot be started: {error}") from None
    if code != 0 and line.folder is not None:
        click.echo(f"hvdtrain: exit code {code}: see {line.folder}/rank.*.log", err=True)
    elif code != 0 and launches.asked is None and launches.silent is not None:
        click.echo(
            f"hvdtrain: {launches.silent} ended the job with exit code {code} and gave no reason",
            err=True,
        )
    return code
