"""`hvdtrain report`: write one HTML page about one run, or several side by side."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="The page. Else RUN/report.html; of several runs report.html here.",
)
@click.option("--live", is_flag=True, help="Serve it to browsers on this machine until Ctrl-C.")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N", help="Of --live; else a free one."
)
def command(runs: tuple[Path, ...], out: Path | None, live: bool, port: int | None) -> None:
    """Write one HTML page about runs, which needs no network.

    RUN is what train was given as --out. The page shows the metrics over time, where the time of
    each rank went, the confusion matrix, and in which options the runs differ.
    """
    from hvdtrain_report.document import serve
    from hvdtrain_report.page import page_of, write_page
    from hvdtrain_report.run import read_run

    if (out if live else port) is not None:
        raise click.UsageError("--out does not go with --live, and --port only with it")
    if live:
        serve(lambda: page_of(list(map(read_run, runs))), port or 0, click.echo)
        return
    path = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    size = write_page([read_run(run) for run in runs], path)
    many = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    click.echo(f"{path}: {many}, {size / 1e6:.1f} MB")
