"""`hvdtrain job`: write a job script for a scheduler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.cli.train import command as train
from hvdtrain.cli.train import read_options
from hvdtrain.errors import UsageError
from hvdtrain.launch.jobs import SCHEDULERS, Scheduler, job_script, parse_seconds
from hvdtrain.launch.scripts.script import is_script, rank_words, require_program
from hvdtrain.launch.sites import sites
from hvdtrain.train.options import TrainOptions

_LAUNCHERS = list(dict.fromkeys(name for kind in SCHEDULERS.values() for name in kind.launchers))
_LONGEST_NOTICE_SECONDS = 300


def _take_options(context: click.Context, _: click.Parameter, site: str | None) -> str | None:
    """Put the options of a site in place of the defaults."""
    if site is not None:
        context.default_map = dict(sites()[site].options)
    return site


def _take_first(
    context: click.Context, _: click.Parameter, arguments: tuple[str, ...]
) -> tuple[str, ...]:
    """With a site, the first word is one of ARGUMENTS, unless it is the site's scheduler."""
    first, name = context.params["scheduler"], context.params["site"]
    if name is None or first in (None, sites()[name].scheduler):
        return arguments
    context.params["scheduler"] = None
    return (first, *arguments)


@click.command()
@click.argument("scheduler", metavar=f"[{'|'.join(SCHEDULERS)}]", required=False)
@click.option(
    "--site",
    type=click.Choice(list(sites())),
    is_eager=True,
    callback=_take_options,
    help="What its documentation asks for, in place of SCHEDULER.",
)
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
@click.option("--stage-env", default="", metavar="DIR", help="Carry Python to the nodes.")
@click.option("--python", help="Of the ranks.  [default: this one; k8s: python]")
@click.option("--script", help="Name of the script's file.  [default: NAME.sh]")
@click.option("--image", default="hvdtrain", show_default=True, help="Of containers, for k8s.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, callback=_take_first)
def command(scheduler: str | None, arguments: tuple[str, ...], **asked: Any) -> None:
    """Write a job script: job slurm --nodes 2 --gpus-per-node 4 --time 4h [-- ARGUMENTS] > FILE.

    ARGUMENTS are those of `python -m hvdtrain` (none: train digits), or a script and its own.
    What `train` is told gets a fixed --out, by default in runs/, and --resume auto.
    """
    site = None if asked["site"] is None else sites()[asked["site"]]
    if site is not None:
        for name in site.needs:
            if not asked[name]:
                raise UsageError(f"--site {asked['site']} takes no job without --{name}: give it")
        scheduler = site.scheduler
    if scheduler is None or scheduler not in SCHEDULERS:
        names = ", ".join(SCHEDULERS)
        raise UsageError(f"scheduler {scheduler or ''!r}: name one of {names}, or a --site")
    in_containers = scheduler == "k8s"
    _choose_launcher(SCHEDULERS[scheduler], scheduler, asked)
    _complete(asked, in_containers)
    require_program(arguments)
    words = list(arguments) or ["train", "digits"]
    if words[0].startswith("-"):
        words = ["train", *words]
    asked["trains"] = words[0] == "train" and not is_script(words)
    out = ""
    if words[0] == "train":
        out, words = _take_out(words)
        options = _asked_of_train(words[1:], out, in_containers)
        out = "" if options.out is None else str(options.out)
    asked["out"] = out or f"{'/runs' if in_containers else 'runs'}/{asked['name']}"
    asked["arguments"] = rank_words(words)
    text = job_script(scheduler, asked, site)
    for note in _notes(scheduler, asked["launcher"]):
        click.echo(f"hvdtrain: {note}", err=True)
    if is_script(arguments) and not in_containers:
        _say_if_absent(Path(arguments[0]))
    click.echo(text, nl=False)


def _choose_launcher(kind: Scheduler, scheduler: str, asked: dict[str, Any]) -> None:
    launcher = asked["launcher"] = asked["launcher"] or kind.launchers[0]
    if launcher not in kind.launchers:
        usable = " or ".join(kind.launchers)
        raise UsageError(f"--launcher {launcher} is not available with {scheduler}: use {usable}")
    array = asked["array"]
    if array and not kind.array:
        raise UsageError(f"--array: job scripts for {scheduler} cannot have one")
    first = array.partition("-")[0]
    if first.isdecimal() and int(first[-9:]) < kind.first:
        raise UsageError(f"--array {array}: {scheduler} counts from {kind.first}")


def _complete(asked: dict[str, Any], in_containers: bool) -> None:
    """Add the defaults that depend on other options, and the times in seconds."""
    if asked["ranks_per_node"] is None:
        asked["ranks_per_node"] = asked["gpus_per_node"]
    asked["seconds"] = parse_seconds(asked["time"], "--time")
    asked["notice_seconds"] = max(1, min(_LONGEST_NOTICE_SECONDS, asked["seconds"] // 4))
    if asked["notice"] is not None:
        asked["notice_seconds"] = parse_seconds(asked["notice"], "--notice")
    asked["python"] = asked["python"] or ("python" if in_containers else sys.executable)
    asked["script"] = asked["script"] or f"{asked['name']}.sh"


def _notes(scheduler: str, launcher: str) -> Iterator[str]:
    """Yield a note for each option that the user has given and the script cannot express."""
    context = click.get_current_context()
    options = {param.name: param.opts[-1] for param in context.command.params}
    unsaid = dict(SCHEDULERS[scheduler].unsaid) if launcher in ("mpirun", "mpiexec") else {}
    if scheduler != "k8s":
        unsaid["image"] = "containers are for k8s"
    for name, instead in unsaid.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            yield f"{options[name]} is not in this script for {scheduler}: {instead}"


def _say_if_absent(path: Path) -> None:
    if not path.exists():
        click.echo(f"hvdtrain: no {path} here: submit the job where it is", err=True)


def _asked_of_train(arguments: list[str], out: str, in_containers: bool) -> TrainOptions:
    """Return the options that `train` would read, and raise now what it would raise in the job."""
    said = train.make_context("train", list(arguments)).params
    config = said["config"]
    if in_containers and config is not None and not config.exists():
        said["config"] = None  # the container may have it
    asked = read_options({**said, "out": Path(out) if out else None, "resume": "never"})
    if asked.recipe_location.path is not None and not in_containers:
        _say_if_absent(asked.recipe_location.path)
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
