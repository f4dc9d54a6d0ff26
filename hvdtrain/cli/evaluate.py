"""`hvdtrain evaluate`: measure a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hvdtrain.cli.train import with_run_options


@click.command()
@click.argument("run", type=Path, metavar="RUN")
@with_run_options
def command(run: Path, checkpoint: str, **changes: Path | str | int) -> None:
    """Measure the model of a run on its test samples, on all ranks: the same numbers on any number.

    RUN is the directory of the run. Rank 0 prints one JSON object.
    """
    from hvdtrain.train.inference import open_run, options_of_run
    from hvdtrain.train.loop.gather import code_of_recipe, on_this_rank

    options = options_of_run(run, checkpoint, changes)
    built = open_run(options)
    with code_of_recipe(options), on_this_rank():
        values = built.loop.evaluate()
    if built.world.topology.rank == 0:
        result = {"checkpoint": options.resume, "samples": built.test_samples, **values}
        click.echo(json.dumps(result))
