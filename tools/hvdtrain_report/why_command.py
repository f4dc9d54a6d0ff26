"""`hvdtrain why`: say which rank of a job failed first, in what, and what to try."""

from __future__ import annotations

from pathlib import Path

import click

from hvdtrain.errors import UsageError
from hvdtrain.topology import format_ranks

_SUMMARY, _STOPPED = "summary.json", "requeue"


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What the job has printed: slurm-N.out, or the output of mpirun or run.",
)
@click.option(
    "--for-torch",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the flight record there, for torch's analyzer.",
)
def command(run: Path, output: Path | None, for_torch: Path | None) -> int:
    """Say which rank of a job failed first, in what, how far the others were, and what to try.

    RUN is what train was given as --out, or the folder in HVDTRAIN_FLIGHT_RECORD.
    """
    from hvdtrain_report.flight import read_ranks, record_files, write_for_torch
    from hvdtrain_report.told import read_told
    from hvdtrain_report.why import explain, judge

    if not run.is_dir():
        raise UsageError(f"{run}: there is no such directory: name train's --out, or the folder")
    ranks = read_ranks(record_files(run))
    if for_torch is not None:
        if not ranks:
            raise UsageError(f"{run} has no flight record to convert")
        write_for_torch(ranks, for_torch)
    told = read_told(_text(output)) if output is not None else None
    running = [rank.rank for rank in ranks if rank.may_run]
    if ranks and len(running) == len(ranks) and not told:
        steps = max(rank.steps for rank in ranks)
        runs = "is running" if all(rank.runs for rank in ranks) else "may still run"
        click.echo(f"{run}: the job {runs}: {format_ranks(running)}, {steps} optimizer steps")
        if judge(ranks, told).cause != "stall":
            return 0
    if not ranks and (run / _STOPPED).exists():
        click.echo(
            f"{run}: the run was asked to stop, and is saved: train --out {run} --resume auto"
        )
        return 0
    if not ranks and not told:
        if (run / _SUMMARY).exists():
            click.echo(f"{run}: the run has ended well ({_SUMMARY} has its results)")
            return 0
        raise UsageError(
            f"{run} has no flight record: the job ended well, or before init() was complete, or "
            "kept none (HVDTRAIN_FLIGHT_RECORD): name what it has printed with --output"
        )
    for line in explain(judge(ranks, told), ranks):
        click.echo(line)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
