"""`hvdtrain job`: write a job script for a scheduler."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.cli.train import command as train
from hvdtrain.cli.train import read_options
from hvdtrain.errors import UsageError
from hvdtrain.launch.jobs import SCHEDULERS, JobRequest, job_script, parse_seconds
from hvdtrain.launch.scripts.script import is_script, rank_words, require_program
from hvdtrain.train.options import TrainOptions

_LAUNCHERS = list(dict.fromkeys(name for kind in SCHEDULERS.values() for name in kind.launchers))
_LONGEST_NOTICE_SECONDS = 300


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("scheduler", type=click.Choice(list(SCHEDULERS)))
@click.option("--nodes", type=int, default=1, show_default=True, help="How many.")
@click.option("--gpus-per-node", type=click.IntRange(0), default=0, help="How many.  [default: 0]")
@click.option("--ranks-per-node", type=int, help="How many.  [default: one for each GPU]")
@click.option("--cpus-per-rank", type=int, default=8, show_default=True, help="Cores of a rank.")
@click.option("--time", required=True, metavar="TIME", help="Time limit: 4h, 90m, 1h30m, 1d.")
@click.option("--notice", metavar="TIME", help="To save before it.  [default: 5m, or a quarter]")
@click.option("--launcher", type=click.Choice(_LAUNCHERS), help="What starts the ranks.")
@click.option("--mpi", default="", help="For srun: pmix for Open MPI, pmi2 for MPICH.")
@click.option("--name", default="hvdtrain", show_default=True, help="Of the job.")
@click.option("--account", default="", help="Whom to charge.")
@click.option("--queue", default="", help="Queue, partition or resource group.")
@click.option("--array", default="", metavar="A-B", help="Jobs of one kind, numbered A to B.")
@click.option("--module", "modules", multiple=True, help="To load; may be given several times.")
@click.option("--python", help="Of the ranks.  [default: this one; k8s: python]")
@click.option("--script", help="Name of the script's file.  [default: NAME.sh]")
@click.option("--image", default="hvdtrain", show_default=True, help="Of containers, for k8s.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(scheduler: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Write a job script: job slurm --nodes 2 --gpus-per-node 4 --time 4h [-- ARGUMENTS] > FILE.

    ARGUMENTS are those of `python -m hvdtrain` (none: train digits), or a script and its own.
    What `train` is told gets a fixed --out, by default in runs/, and --resume auto.
    """
    request = _request(scheduler, list(arguments), **options)
    for note in _notes(scheduler, request):
        click.echo(f"hvdtrain: {note}", err=True)
    if is_script(arguments) and scheduler != "k8s" and not os.path.isfile(arguments[0]):
        click.echo(f"hvdtrain: no {arguments[0]} here: submit the job where it is", err=True)
    click.echo(job_script(scheduler, request), nl=False)


def _notes(scheduler: str, request: JobRequest) -> Iterator[str]:
    """Yield a note for each option that the user has given and the script cannot express."""
    context = click.get_current_context()
    options = {param.name: param.opts[-1] for param in context.command.params}
    unsaid = dict(SCHEDULERS[scheduler].unsaid) if request.launcher == "mpirun" else {}
    if scheduler != "k8s":
        unsaid["image"] = "containers are for k8s"
    for name, instead in unsaid.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            yield f"{options[name]} is not in this script for {scheduler}: {instead}"


def _request(
    scheduler: str,
    arguments: list[str],
    *,
    ranks_per_node: int | None,
    time: str,
    notice: str | None,
    launcher: str | None,
    python: str | None,
    script: str | None,
    **plain: Any,
) -> JobRequest:
    """Return the request, with defaults for what the user has left out."""
    kind, in_containers = SCHEDULERS[scheduler], scheduler == "k8s"
    launcher = launcher or kind.launchers[0]
    if launcher not in kind.launchers:
        usable = " or ".join(kind.launchers)
        raise UsageError(f"--launcher {launcher} is not available with {scheduler}: use {usable}")
    if plain["array"] and not kind.array:
        raise UsageError(f"--array: job scripts for {scheduler} cannot have one")
    first = plain["array"].partition("-")[0]
    if first.isdecimal() and int(first[-9:]) < kind.first:
        raise UsageError(f"--array {plain['array']}: {scheduler} counts from {kind.first}")
    seconds = parse_seconds(time, "--time")
    if notice is None:
        notice_seconds = max(1, min(_LONGEST_NOTICE_SECONDS, seconds // 4))
    else:
        notice_seconds = parse_seconds(notice, "--notice")
    require_program(arguments)
    if not arguments:
        arguments = ["train", "digits"]
    if arguments[0].startswith("-"):
        arguments = ["train", *arguments]
    out = ""
    if arguments[0] == "train":
        out, arguments = _take_out(arguments)
        asked = _asked(arguments[1:], out, in_containers)
        out = "" if asked.out is None else str(asked.out)
    runs = "/runs" if in_containers else "runs"
    return JobRequest(
        ranks_per_node=plain["gpus_per_node"] if ranks_per_node is None else ranks_per_node,
        seconds=seconds,
        notice_seconds=notice_seconds,
        launcher=launcher,
        python=python or ("python" if in_containers else sys.executable),
        script=script or f"{plain['name']}.sh",
        out=out or f"{runs}/{plain['name']}",
        arguments=rank_words(arguments),
        trains=not is_script(arguments) and arguments[0] == "train",
        **plain,
    )


def _asked(arguments: list[str], out: str, in_containers: bool) -> TrainOptions:
    """Return the options that `train` would read, and raise now what it would raise in the job."""
    said = train.make_context("train", list(arguments)).params
    config = said["config"]
    if in_containers and config is not None and not config.exists():
        said["config"] = None  # the container may have it
    asked = read_options({**said, "out": Path(out) if out else None, "resume": "never"})
    recipe_file = asked.recipe_location.path
    if recipe_file is not None and not in_containers and not recipe_file.exists():
        click.echo(f"hvdtrain: no {recipe_file} here: submit the job where it is", err=True)
    return asked


def _take_out(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the directory that --out names, empty without one, and the other arguments."""
    out, rest, words = "", [], iter(arguments)
    for word in words:
        if word == "--out":
            out = next(words, "")
            if not out:
                raise UsageError("--out requires an argument: a directory")
        elif word.startswith("--out="):
            out = word.removeprefix("--out=")
        elif word.split("=")[0] == "--resume":
            raise UsageError("leave out --resume: a job always resumes from its last checkpoint")
        else:
            rest.append(word)
    return out, rest
