"""`hvdtrain predict`: apply a trained model to files."""

from __future__ import annotations

from pathlib import Path

import click

from hvdtrain.cli.train import with_run_options


@click.command()
@click.argument("run", type=Path, metavar="RUN")
@click.argument("files", type=Path, nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--out", type=Path, metavar="FILE", help="A .npy file for the outputs, instead of lines."
)
@with_run_options
def command(
    run: Path,
    files: tuple[Path, ...],
    checkpoint: str,
    out: Path | None = None,
    **changes: Path | str | int,
) -> None:
    """Use the model of a run on the samples in files, on all ranks: the same numbers on any number.

    RUN is the directory of the run. A FILE is what the recipe reads, an array [samples, ...] in
    numpy's .npy where it says nothing else. Rank 0 prints one JSON object for each sample: its
    class and the probability of it where the recipe names classes, else the outputs.
    """
    from hvdtrain.train.inference import (
        open_run,
        options_of_run,
        predict_files,
        prediction_lines,
        write_outputs,
    )

    built = open_run(options_of_run(run, checkpoint, changes))
    if out is not None and out.suffix != ".npy":
        raise click.UsageError(f"--out {out}: its name must end with .npy")
    outputs, counts = predict_files(built, files)
    if built.world.topology.rank:
        return
    if out is not None:
        write_outputs(out, outputs)
        return
    for line in prediction_lines(outputs, counts, built.recipe.classes):
        click.echo(line)
