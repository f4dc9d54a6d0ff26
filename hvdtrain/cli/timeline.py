"""`hvdtrain timeline`: merge the pieces of a timeline that a failed job has left."""

from __future__ import annotations

import os

import click


@click.command()
@click.argument("path", metavar="FILE")
@click.option("--out", metavar="FILE", help="The file to write. Else the one that is named.")
def command(path: str, out: str | None) -> None:
    """Make one timeline of the pieces of a job that was killed or has failed.

    FILE is what the job was given as HVDTRAIN_TIMELINE, or to start_timeline().
    """
    from hvdtrain.core.timeline.file import merge_pieces

    path, out = os.path.realpath(path), out or path
    pieces = merge_pieces(path, out)
    click.echo(f"{out}: {len(pieces)} pieces")
