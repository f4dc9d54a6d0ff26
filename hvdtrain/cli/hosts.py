"""`hvdtrain hosts`: read the hosts of a file or job, check them, and write them for a launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.formats import (
    FOREIGN,
    FORMATS,
    guess_format,
    left_out,
    read_file,
    source_of_job,
    write_hosts,
)
from hvdtrain.launch.hosts.host import (
    Host,
    mixed_names,
    objections,
    require_slots,
    with_slots,
)

_OF_JOBS = ("slurm", "pbs", "oar", "sge", "lsf", "pjm", "flux", "k8s")


@click.command()
@click.option(
    "--from",
    "origin",
    required=True,
    metavar="|".join((*_OF_JOBS, "FILE")),
    help="The job this is called in, or a file.",
)
@click.option("--format", "form", type=click.Choice(list(FORMATS)), help="Of FILE; else guessed.")
@click.option(
    "--to", type=click.Choice(list(FORMATS)), default="openmpi", show_default=True, help="For whom."
)
@click.option("--slots", type=click.IntRange(1), help="Of hosts without a number.")
@click.option("-np", "--np", "ranks", type=click.IntRange(1), help="How many ranks must fit.")
@click.option("--check", is_flag=True, help="Write nothing; say what a launcher would do wrong.")
def command(
    origin: str, form: str | None, to: str, slots: int | None, ranks: int | None, check: bool
) -> None:
    """Read the hosts of a file or a job, check them, and write them for a launcher.

    hosts --from slurm --to mpich > hosts; hosts --from hosts --check -np 8
    """
    if origin in _OF_JOBS and not os.path.exists(origin):
        source, form = source_of_job(origin, os.environ), form or origin
    else:
        source = read_file(origin)
        form = form or guess_format(source)
    hosts = FORMATS[form].read(source)
    if source.foreign and check:
        raise UsageError(f"{source.name}: {FOREIGN}: --to writes a file without")
    if source.foreign:
        click.echo(f"{source.name}: {FOREIGN}: written without", err=True)
    if slots is not None:
        hosts = with_slots(hosts, slots, source.name)
    found = objections(hosts, source.name)
    if found and (check or not hosts):
        raise UsageError("; ".join(found))
    if FORMATS[to].slots or ranks is not None:
        hosts = with_slots(hosts, slots, source.name)
    if ranks is not None:
        require_slots(hosts, ranks, source.name)
    if check:
        many = "host" if len(hosts) == 1 else "hosts"
        slots_found = sum(host.slots or 0 for host in hosts)
        click.echo(f"{source.name}: {len(hosts)} {many}, {slots_found} slots")
    else:
        text = write_hosts(hosts, to)
        _warn(hosts, to, source.name)
        click.echo(text, nl=False)


def _warn(hosts: Sequence[Host], to: str, where: str) -> None:
    """Warn on stderr about doubtful names, and about details that the written text lacks."""
    for line in mixed_names(hosts):
        click.echo(f"{where}: {line}", err=True)
    missing = left_out(hosts, to)
    if missing:
        shown = ", ".join(missing[:5]) + " ..." * (len(missing) > 5)
        click.echo(f"{where}: not written for {to}: {shown}", err=True)
